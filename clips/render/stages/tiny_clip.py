"""The check's models for development: two towers, one for words and one for pictures, as in CLIP,
of 25,000 to 40,000 weights each. They know what ``face`` can draw (docs/slot.md
says how they were made).

A score is the probability that the picture shows what the prompt says (SigLIP's pairwise sigmoid,
arXiv 2303.15343), so that SL-7's thresholds mean what they mean for large models.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from zlib import crc32

import torch
import torch.nn.functional as nn
from safetensors.torch import load_file

from clips.render.memory import Resident
from clips.render.stages.base import ModelScore, Step
from clips.render.stages.checkpoint import resident
from clips.render.stages.face import words_of
from worker.errors import LoadError

WIDTH = 32
BUCKETS = 512
SIZE = 48
"""Pixels of either side to which a picture is reduced."""
NAMES = ("tiny-a", "tiny-b")
CHANNELS: dict[str, tuple[int, ...]] = {NAMES[0]: (8, 12, 16, 16), NAMES[1]: (12, 16, 16)}
FOLDER = Path(__file__).parent / "tiny_clip_weights"


class TwoTowers(torch.nn.Module):
    """Two towers. ``channels``: those of the convolutions, each of which halves the picture. Words
    not seen in training have weights of 0."""

    def __init__(self, channels: Sequence[int]) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(BUCKETS, WIDTH)
        self.convolutions = torch.nn.ModuleList(
            torch.nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in pairwise([3, *channels])
        )
        side = SIZE
        for _ in channels:
            side = (side + 1) // 2
        self.out = torch.nn.Linear(channels[-1] * side * side, WIDTH)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))
        self.bias = torch.nn.Parameter(torch.tensor(0.0))

    def forward(self, buckets: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        """Probabilities ``[n]`` that ``pixels`` ``[n, 3, SIZE, SIZE]``, 0 to 1, show the words in
        ``buckets`` ``[words]``."""
        hidden = pixels * 2 - 1
        for convolution in self.convolutions:
            hidden = nn.gelu(convolution(hidden))
        picture = nn.normalize(self.out(hidden.flatten(1)), dim=-1)
        text = self.words(buckets).sum(0)
        return torch.sigmoid(self.scale.exp() * (picture @ text) + self.bias)


class TinyClipCheck:
    """A ``CheckProvider``."""

    name = "tiny"

    def __init__(self, device: torch.device) -> None:
        """Load the weights. Raises ``LoadError``."""
        self._device = device
        self._models = {name: _load(name).to(device) for name in NAMES}

    def residents(self) -> Sequence[Resident]:
        return [resident(name, [model], "float32") for name, model in self._models.items()]

    def close(self) -> None:
        self._models.clear()

    def score(
        self, prompt: str, keyframes: torch.Tensor, step: Step
    ) -> tuple[ModelScore, ModelScore]:
        buckets = torch.tensor(
            [crc32(word.encode()) % BUCKETS for word in words_of(prompt)],
            dtype=torch.long,
            device=self._device,
        )
        pixels = nn.interpolate(
            keyframes.to(self._device, torch.float32) / 255, (SIZE, SIZE), mode="area"
        )
        scores = []
        for number, (name, model) in enumerate(self._models.items()):
            step(number / len(self._models))
            scores.append(ModelScore(name, tuple(model(buckets, pixels).tolist())))
        return scores[0], scores[1]


def _load(name: str) -> TwoTowers:
    path = FOLDER / f"{name}.safetensors"
    model = TwoTowers(CHANNELS[name])
    try:
        model.load_state_dict(load_file(path))
    except (OSError, RuntimeError) as error:
        raise LoadError(f"{path}: {error}") from None
    return model.eval()
