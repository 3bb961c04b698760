"""Portraits by FLUX.1-schnell (12 billion weights, 4 steps) through diffusers, from a folder.

Transformer and decoder stay on the device: 24 GB in bf16, 12 GB in fp8, 6.3 GB in nf4. The text
encoders are 9.8 GB more in bf16: they stay in the host's memory and pass through the device layer
by layer, once for each new prompt.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as nn

from clips.plan.recipe import Recipe
from clips.render.memory import Resident
from clips.render.stages.base import Step
from clips.render.stages.checkpoint import (
    Pace,
    loading,
    need_all,
    not_installed,
    open_folder,
    resident,
)
from worker.errors import LoadError

FluxPrecision = Literal["fp32", "bf16", "fp8", "nf4"]

SETTING = "flux of TIDEGATE_SLOT__FOLDERS"
FRAMING = (
    "Portrait photograph of one person, head and shoulders, centred, facing the camera, mouth"
    " closed, eyes open. "
)
"""Text put in front of each prompt, for what the video stages need of a portrait."""
_STEPS = 4
_MAX_TOKENS = 256
_KEPT_PROMPTS = 16
"""Prompts whose encodings are kept, about 2 MB each."""
_MIN_SIZE = 256
"""Smallest side in pixels that is drawn: the model has learned none smaller; smaller portraits are
scaled down."""
_MULTIPLE = 16
"""Pixels of either side that one of the model's tokens stands for."""
_TILE = 512
"""Pixels of either side that are decoded at once."""
_FILES = (
    "scheduler/scheduler_config.json",
    "transformer/config.json",
    "vae/config.json",
    "text_encoder/config.json",
    "text_encoder_2/config.json",
    "tokenizer/tokenizer_config.json",
    "tokenizer_2/tokenizer_config.json",
)


@dataclass(frozen=True, slots=True)
class FluxOptions:
    precision: FluxPrecision = "nf4"
    """Precision of the transformer; everything else is bf16 (fp32 with ``fp32``)."""
    least_size: int = _MIN_SIZE

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.precision == "fp32" else torch.bfloat16


class FluxPortrait:
    """A ``PortraitProvider``."""

    name = "flux"

    def __init__(self, pictures: Any, texts: Any, device: torch.device, options: FluxOptions):
        """``pictures`` is a ``FluxPipeline`` of scheduler, transformer and decoder, ``texts`` one
        of tokenizers and text encoders; all on the CPU, the transformer in ``options.dtype``.

        Raises ``LoadError`` if ``options.precision`` needs a missing package."""
        from diffusers.utils import logging

        # diffusers would log the text of prompts that are too long for one of the encoders.
        logging.set_verbosity_error()
        self._device = device
        self._options = options
        _place(pictures, device, options)
        _place_texts(texts, device)
        self._pictures, self._texts = pictures, texts
        pictures.set_progress_bar_config(disable=True)
        self._encoded = lru_cache(_KEPT_PROMPTS)(self._encode)
        self._look: Step | None = None
        self._done = 0.0
        for block in _blocks(pictures, texts):
            block.register_forward_pre_hook(self._between)

    @classmethod
    def load(cls, device: torch.device, folder: str, options: FluxOptions) -> "FluxPortrait":
        """Load the weights in ``folder``. Raises ``LoadError``."""
        try:
            from diffusers import FluxPipeline
        except ImportError as error:
            raise not_installed("flux", "slot-flux", error) from None
        path = open_folder(folder, SETTING, "FLUX.1-schnell in diffusers' layout", _FILES)
        none = dict.fromkeys(
            ("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2", "transformer", "vae")
        )
        with loading(path):
            pictures, texts, scheduler = _load_parts(path, options.dtype)
        return cls(
            FluxPipeline(scheduler=scheduler, **none | pictures),
            FluxPipeline(scheduler=scheduler, **none | texts),
            device,
            options,
        )

    def residents(self) -> Sequence[Resident]:
        precision = self._options.precision
        others = "fp32" if precision == "fp32" else "bf16"
        kept = [
            resident("flux transformer", [self._pictures.transformer], precision),
            resident("flux decoder", [self._pictures.vae], others),
        ]
        encoders = [self._texts.text_encoder, self._texts.text_encoder_2]
        if self._device.type == "cpu":
            kept.append(resident("flux text encoders", encoders, others))
        return kept

    def close(self) -> None:
        self._encoded.cache_clear()
        self._pictures = self._texts = None

    def render(self, recipe: Recipe, actor: torch.Tensor, step: Step) -> None:
        size = max(self._options.least_size, actor.shape[-1])
        size += -size % _MULTIPLE
        # On the CPU, so that a seed gives the same noise on every device.
        generator = torch.Generator().manual_seed(recipe.portrait.seed)
        # Parameters that are moved or quantized are swapped in ways that inference mode forbids.
        with self._looked_after(step), torch.inference_mode(False), torch.no_grad():
            words, pooled = self._encoded(FRAMING + recipe.portrait.prompt)
            (picture,) = self._pictures(
                prompt_embeds=words,
                pooled_prompt_embeds=pooled,
                height=size,
                width=size,
                num_inference_steps=_STEPS,
                guidance_scale=0.0,
                generator=generator,
                output_type="pt",
                callback_on_step_end=self._stepped,
                return_dict=False,
            )
            picture = picture.float()
            if size != actor.shape[-1]:
                picture = nn.interpolate(
                    picture, actor.shape[-2:], mode="bilinear", antialias=True
                ).clamp_(0, 1)
            actor.copy_(picture[0])
        step(1.0)

    def _encode(self, prompt: str) -> tuple[torch.Tensor, torch.Tensor]:
        """A prompt's embeddings on the device: T5's for each token, CLIP's for the whole."""
        words, pooled, _ = self._texts.encode_prompt(
            prompt, None, device=self._device, max_sequence_length=_MAX_TOKENS
        )
        return words.to(self._device), pooled.to(self._device)

    @contextmanager
    def _looked_after(self, step: Step) -> Iterator[None]:
        pace = Pace(self._device)

        def look(done: float) -> None:
            pace()
            step(done)

        self._look, self._done = look, 0.0
        step(0.0)
        try:
            yield
        finally:
            self._look = None

    def _between(self, *_: object) -> None:
        """Call ``look`` before each block of each network: one step may take seconds."""
        if self._look is not None:
            self._look(self._done)

    def _stepped(
        self, _pipe: Any, number: int, _time: Any, state: dict[str, Any]
    ) -> dict[str, Any]:
        self._done = (number + 1) / (_STEPS + 1)
        self._between()
        return state


def _load_parts(path: Path, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Load the parts for pictures, those for texts, and the scheduler."""
    from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
    from transformers import AutoTokenizer, CLIPTextModel, T5EncoderModel

    def weights(kind: Any, name: str) -> Any:
        model, info = kind.from_pretrained(
            path / name, dtype=dtype, local_files_only=True, output_loading_info=True
        )
        need_all(path / name, info["missing_keys"])
        return model.eval()

    pictures = {
        "transformer": weights(FluxTransformer2DModel, "transformer"),
        "vae": weights(AutoencoderKL, "vae"),
    }
    texts = {
        "text_encoder": weights(CLIPTextModel, "text_encoder"),
        "text_encoder_2": weights(T5EncoderModel, "text_encoder_2"),
        "tokenizer": AutoTokenizer.from_pretrained(path / "tokenizer", local_files_only=True),
        "tokenizer_2": AutoTokenizer.from_pretrained(path / "tokenizer_2", local_files_only=True),
    }
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(path / "scheduler")
    return pictures, texts, scheduler


def _place(pictures: Any, device: torch.device, options: FluxOptions) -> None:
    """Move transformer and decoder to ``device``, as small as asked. Raises ``LoadError``."""
    transformer = pictures.transformer
    transformer.requires_grad_(False)
    is_quantized = getattr(transformer, "is_quantized", False)
    if options.precision == "nf4" and not is_quantized:
        for blocks in (transformer.transformer_blocks, transformer.single_transformer_blocks):
            for block in blocks:
                quantize(block, device, options.dtype)
    if is_quantized and options.precision != "nf4":
        raise LoadError(
            f"{SETTING} has a transformer that is quantized already: state nf4 for it in"
            " TIDEGATE_SLOT__PRECISIONS, which takes it as it is"
        )
    if options.precision == "fp8":
        transformer.enable_layerwise_casting(
            storage_dtype=torch.float8_e4m3fn, compute_dtype=options.dtype
        )
    transformer.to(device)
    pictures.vae.requires_grad_(False).to(device)
    pictures.vae.enable_tiling()
    pictures.vae.tile_sample_min_size = _TILE
    pictures.vae.tile_latent_min_size = _TILE // pictures.vae_scale_factor


def _place_texts(texts: Any, device: torch.device) -> None:
    for encoder in (texts.text_encoder, texts.text_encoder_2):
        encoder.requires_grad_(False)
        if device.type == "cuda":
            from diffusers.hooks import apply_group_offloading

            apply_group_offloading(
                encoder,
                onload_device=device,
                offload_device=torch.device("cpu"),
                offload_type="leaf_level",
                use_stream=True,
            )


def _blocks(pictures: Any, texts: Any) -> Iterator[torch.nn.Module]:
    """Blocks that take long enough to check before each whether to stop."""
    yield from texts.text_encoder_2.encoder.block
    yield from pictures.transformer.transformer_blocks
    yield from pictures.transformer.single_transformer_blocks
    yield from pictures.vae.decoder.up_blocks


def quantize(module: torch.nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Replace each linear layer of ``module`` by one of 4.13 bits a weight on ``device`` that
    computes in ``dtype``, one after the other, so that the module is never in memory twice.

    Raises ``LoadError`` without bitsandbytes.
    """
    try:
        from bitsandbytes.nn import Linear4bit, Params4bit
    except ImportError as error:
        raise not_installed("flux in nf4", "slot-flux", error) from None
    for name, layer in list(module.named_modules()):
        if type(layer) is not torch.nn.Linear:
            continue
        small: Any = Linear4bit(
            layer.in_features,
            layer.out_features,
            bias=layer.bias is not None,
            compute_dtype=dtype,
            quant_type="nf4",
            compress_statistics=True,
            device="meta",
        )
        small.weight = Params4bit(
            layer.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
        )
        small.bias = layer.bias
        parent, _, last = name.rpartition(".")
        setattr(module.get_submodule(parent), last, small.to(device))
