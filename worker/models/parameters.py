"""What a model wants loaded, whatever the checkpoint calls or splits it. No torch."""

from dataclasses import dataclass
from enum import Enum


class Kind(Enum):
    """What a parameter is used for, and so how it may be kept."""

    TENSOR = "tensor"
    """Used as it is: a norm."""
    EMBEDDING = "embedding"
    """Looked up row by row."""
    LINEAR = "linear"
    """x → x Wᵀ + b."""
    GATED = "gated"
    """x → silu(x Gᵀ) * (x Uᵀ); gate and up, in that order."""


@dataclass(frozen=True, slots=True)
class Part:
    """A tensor of the checkpoint and the shape that the configuration gives it."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """Parts of the checkpoint, stacked along dimension 0; ``bias`` likewise, for a linear one."""

    kind: Kind
    parts: tuple[Part, ...]
    bias: tuple[Part, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return stacked_shape(self.parts)

    @property
    def elements(self) -> int:
        return sum(_product(part.shape) for part in (*self.parts, *self.bias))


def stacked_shape(parts: tuple[Part, ...]) -> tuple[int, ...]:
    """Of ``parts`` along dimension 0."""
    return (sum(part.shape[0] for part in parts), *parts[0].shape[1:])


def _product(shape: tuple[int, ...]) -> int:
    product = 1
    for size in shape:
        product *= size
    return product
