"""Rotary position embedding (Su et al. 2021), halves rotated as in Hugging Face's layout."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from worker.models.config import ModelConfig
from worker.models.fused import rotate_
from worker.models.rope_scaling import LinearScaling, Llama3Scaling, YarnScaling


class Rotation:
    """Cosines and sines for every position of the context."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
        frequencies, scale = rotary_frequencies(config)
        angles = torch.outer(torch.arange(config.context_tokens).float(), frequencies)
        cos, sin = angles.cos() * scale, angles.sin() * scale
        # Signs and halves are folded into the tables: one product and one sum are left.
        self._cos = torch.cat((cos, cos), dim=-1).to(device, dtype)
        self._sin = torch.cat((-sin, sin), dim=-1).to(device, dtype)

    def at(self, positions: Tensor) -> "AngleTable":
        """Tables for ``positions`` [tokens], gathered once for all layers of a step."""
        return AngleTable(self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1))


@dataclass(frozen=True, slots=True)
class AngleTable:
    """Cosines and signed sines [tokens, 1, head_dim] of one step's positions."""

    cos: Tensor
    sin: Tensor

    def apply_(self, heads: Tensor, count: int) -> None:
        """Rotate the first ``count`` of ``heads`` [tokens, heads, head_dim] in place."""
        rotate_(heads, count, self.cos, self.sin)


def rotary_frequencies(config: ModelConfig) -> tuple[Tensor, float]:
    """Radians per position [head_dim / 2] float32, and the factor of cosines and sines."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    frequencies = config.rope_theta**-exponents
    match config.rope_scaling:
        case LinearScaling(factor):
            return frequencies / factor, 1.0
        case YarnScaling() as yarn:
            return _yarn(frequencies, yarn, config), yarn.attention_factor
        case Llama3Scaling() as llama3:
            return _llama3(frequencies, llama3), 1.0
    return frequencies, 1.0


def _llama3(frequencies: Tensor, scaling: Llama3Scaling) -> Tensor:
    """Long wavelengths divided by ``factor``, short ones kept, a smooth ramp between."""
    context = scaling.original_max_position_embeddings
    turns = context * frequencies / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


def _yarn(frequencies: Tensor, scaling: YarnScaling, config: ModelConfig) -> Tensor:
    """Like ``_llama3``, but with a ramp that is linear in the index of the dimension."""

    def dimension(turns: float) -> float:
        """Index of the dimension that makes ``turns`` turns within the original context."""
        context = scaling.original_max_position_embeddings
        span = math.log(context / (turns * 2 * math.pi))
        return config.head_dim * span / (2 * math.log(config.rope_theta))

    low, high = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, config.head_dim - 1)
    ramp = (torch.arange(len(frequencies)).float() - low) / max(high - low, 1e-3)
    kept = 1 - ramp.clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)
