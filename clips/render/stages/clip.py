"""Checks clips by two CLIP models (arXiv 2103.00020), from local folders, through transformers.

A score is CLIPScore (arXiv 2104.08718): 2.5 times the cosine between picture and words, limited to
0 to 1. CLIP's cosines are small (about 0.3 if a picture matches its words, 0.15 if not); on this
scale SL-7's thresholds 0.70 and 0.72 are cosines of 0.28 and 0.288, and its outlier of 0.15 is one
of 0.06.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as nn

from clips.render.memory import Resident
from clips.render.stages.base import ModelScore, Step
from clips.render.stages.checkpoint import (
    DTYPES,
    Precision,
    loading,
    need_all,
    not_installed,
    open_folder,
    resident,
)
from worker.errors import LoadError, UnsupportedModel

SCALE = 2.5
"""CLIPScore's ``w``."""
SETTING = "clip of TIDEGATE_SLOT__FOLDERS"
_FILES = (
    "config.json",
    "preprocessor_config.json",
    ("tokenizer.json", "vocab.json"),
    ("model.safetensors", "pytorch_model.bin"),
)


@dataclass(frozen=True, slots=True)
class _Model:
    name: str
    clip: Any
    tokenizer: Any
    size: int
    most_tokens: int
    mean: torch.Tensor
    deviation: torch.Tensor

    def cosines(self, prompt: str, keyframes: torch.Tensor) -> torch.Tensor:
        """Cosines ``[keyframes]`` of prompt and keyframes, in one pass."""
        device = self.mean.device
        words = self.tokenizer(
            [prompt], truncation=True, max_length=self.most_tokens, return_tensors="pt"
        ).to(device)
        text = _pooled(self.clip.get_text_features(**words))
        picture = _pooled(self.clip.get_image_features(pixel_values=self._pixels(keyframes)))
        unit = nn.normalize(picture.float(), dim=-1) @ nn.normalize(text.float(), dim=-1).T
        return unit[:, 0]

    def _pixels(self, keyframes: torch.Tensor) -> torch.Tensor:
        """Pixels as the checkpoint's preprocessor makes them: scaled bicubically, normalized."""
        pixels = keyframes.to(self.mean.device, torch.float32) / 255
        pixels = nn.interpolate(
            pixels, (self.size, self.size), mode="bicubic", antialias=True, align_corners=False
        )
        return ((pixels.clamp_(0, 1) - self.mean) / self.deviation).to(self.clip.dtype)


class ClipCheck:
    """A ``CheckProvider``."""

    name = "clip"

    def __init__(
        self, device: torch.device, folders: Sequence[str], precision: Precision = "fp16"
    ) -> None:
        """``folders``: the model that weighs 0.4, then the one that weighs 0.6. Raises
        ``LoadError``."""
        if len(folders) != 2:
            raise LoadError(f"{SETTING} must be two folders with a comma between, not {folders}")
        self._precision = precision
        self._models = [_load(folder, device, precision) for folder in folders]

    def residents(self) -> Sequence[Resident]:
        return [resident(each.name, [each.clip], self._precision) for each in self._models]

    def close(self) -> None:
        self._models.clear()

    def score(
        self, prompt: str, keyframes: torch.Tensor, step: Step
    ) -> tuple[ModelScore, ModelScore]:
        scores = []
        for number, model in enumerate(self._models):
            step(number / len(self._models))
            likeness = (SCALE * model.cosines(prompt, keyframes)).clamp(0, 1)
            scores.append(ModelScore(model.name, tuple(likeness.tolist())))
        step(1.0)
        return scores[0], scores[1]


def _pooled(features: Any) -> torch.Tensor:
    """The pooled features, which transformers 5 wraps and transformers 4 returns plainly."""
    pooled: torch.Tensor = getattr(features, "pooler_output", features)
    return pooled


def _load(folder: str, device: torch.device, precision: Precision) -> _Model:
    try:
        from transformers import AutoTokenizer, CLIPModel
    except ImportError as error:
        raise not_installed("clip", "slot-clip", error) from None
    path = open_folder(folder, SETTING, "a CLIP model", _FILES)
    with loading(path):
        config, pictures = (
            json.loads((path / name).read_text())
            for name in ("config.json", "preprocessor_config.json")
        )
        if config.get("model_type") != "clip":
            raise UnsupportedModel(f"{path} is of type {config.get('model_type')!r}, not 'clip'")
        loaded: Any = CLIPModel.from_pretrained(
            path, dtype=DTYPES[precision], local_files_only=True, output_loading_info=True
        )
        model, info = loaded
        need_all(path, info["missing_keys"])
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        mean, deviation = (
            torch.tensor(pictures[key], device=device)[:, None, None]
            for key in ("image_mean", "image_std")
        )
    return _Model(
        name=path.name,
        clip=model.eval().to(device),
        tokenizer=tokenizer,
        size=model.config.vision_config.image_size,
        most_tokens=model.config.text_config.max_position_embeddings,
        mean=mean,
        deviation=deviation,
    )
