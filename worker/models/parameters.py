"""The parameters that a model needs, however a checkpoint names or splits them. No torch."""

import math
from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a parameter is used for, which decides how it may be kept."""

    TENSOR = "tensor"
    """Used as it is, such as a norm."""
    EMBEDDING = "embedding"
    """A table that is looked up row by row."""
    LINEAR = "linear"
    """A linear layer, x → x Wᵀ + b."""
    GATED = "gated"
    """A gated pair, x → silu(x Gᵀ) * (x Uᵀ); gate and up, in that order."""


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A tensor of the checkpoint and the shape that the configuration gives it."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parts of the checkpoint, stacked along dimension 0; ``bias`` likewise, for a linear one."""

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
