"""The parameters of a model, independent of a checkpoint's names and splits. No torch."""

import math
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """A parameter's use, which determines how it may be stored."""

    TENSOR = "tensor"
    """Used unchanged, such as a norm."""
    EMBEDDING = "embedding"
    """A lookup table, read row by row."""
    LINEAR = "linear"
    """A linear layer, x → x Wᵀ + b."""
    GATED = "gated"
    """A gated pair, x → silu(x Gᵀ) * (x Uᵀ); gate and up, in that order."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A checkpoint tensor and its shape according to the configuration."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """Checkpoint parts, stacked along dimension 0; ``bias`` likewise, for a linear layer."""

    kind: Kind
    parts: tuple[StoredPart, ...]
    bias: tuple[StoredPart, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return stacked_shape(self.parts)

    @property
    def elements(self) -> int:
        return sum(math.prod(part.shape) for part in (*self.parts, *self.bias))


def stacked_shape(parts: tuple[StoredPart, ...]) -> tuple[int, ...]:
    """Shape of ``parts`` stacked along dimension 0."""
    return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
