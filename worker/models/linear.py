"""Linear layers by memory layout: dense, transposed ("turned"), mapped from the file, or packed for
oneDNN. ``worker.models.blocked`` has weights in blocks for our own kernel, if there is one.

Share of the read bandwidth on two cores (AMD, avx512_bf16), bfloat16 weights beyond the cache:
dense 0.5, packed 0.75 for one row and 0.95 for four. So packed layers need at least four rows
(``least_rows``). ``deterministic`` requires that a row's sums do not depend on its position in a
tile. CPUs differ in that, so ``TiledForward.check`` tests it at load.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from worker.models.fused import gated


class Linear(Protocol):
    """A linear layer, or a gated pair of linear layers."""

    def __call__(self, x: Tensor) -> Tensor:
        """Map ``x`` [rows, in] to [rows, out]."""

    @property
    def nbytes(self) -> int:
        """Bytes that one call reads."""


class Format(Protocol):
    """Makes layers from weights [out, in] of one dtype."""

    @property
    def least_rows(self) -> int:
        """Number of rows below which a product costs as much or more."""

    @property
    def tile_rows(self) -> int:
        """Rows multiplied at a time: one row past a full tile costs as much as a whole tile."""

    @property
    def rows_dtype(self) -> torch.dtype | None:
        """Dtype of its layers' rows, results and biases; None: the weights' dtype."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear: ...

    def gated(self, weight: Tensor) -> Linear:
        """Make a layer x → silu(x Gᵀ) * (x Uᵀ); ``weight`` is G and U, stacked."""


class DenseFormat:
    """A ``Format`` that keeps weights unchanged."""

    least_rows = 1
    tile_rows = 1
    rows_dtype = None

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return DenseLinear(weight, bias)

    def gated(self, weight: Tensor) -> Linear:
        return SplitGated(self.linear(weight, None))


class TurnedFormat(DenseFormat):
    """A ``Format`` that stores weights as [in, out], which BLAS reads in order for a few rows.

    Measured on two cores (Intel, AVX-512), float32, one thread, 4 to 32 rows: 1.2 to 1.9 times as
    fast as [out, in]; equally fast at one row and for long prompts.
    """

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return DenseLinear(weight.t().contiguous().t(), bias)


class PackedFormat:
    """A ``Format`` that copies weights into oneDNN's own order."""

    least_rows = 4
    tile_rows = 1
    rows_dtype = None

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return PackedLinear(_pack(weight), bias)

    def gated(self, weight: Tensor) -> Linear:
        # Packed separately, so that oneDNN fuses activation and product with the matrix products.
        gate, up = weight.chunk(2)
        return PackedGated(_pack(gate), _pack(up))


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN has packed layers of ``dtype`` on this CPU."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if dtype == torch.float32:
        return True
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())


@dataclass(frozen=True, slots=True)
class DenseLinear:
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes


_linear_pointwise = torch.ops.mkldnn._linear_pointwise.default
_linear_binary = torch.ops.mkldnn._linear_pointwise.binary


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight in oneDNN's order; ``nbytes`` excludes the padding of odd shapes."""

    weight: Tensor
    nbytes: int


@dataclass(frozen=True, slots=True)
class PackedLinear:
    packed: Packed
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = _linear_pointwise(x, self.packed.weight, self.bias, "none", [], "")
        return out

    @property
    def nbytes(self) -> int:
        return self.packed.nbytes


@dataclass(frozen=True, slots=True)
class PackedGated:
    gate: Packed
    up: Packed

    def __call__(self, x: Tensor) -> Tensor:
        gate = _linear_pointwise(x, self.gate.weight, None, "swish", [], "")
        out: Tensor = _linear_binary(x, gate, self.up.weight, None, "mul")
        return out

    @property
    def nbytes(self) -> int:
        return self.gate.nbytes + self.up.nbytes


@dataclass(frozen=True, slots=True)
class SplitGated:
    """A gated layer over one linear layer whose outputs are gate and up."""

    both: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return gated(self.both(x))

    @property
    def nbytes(self) -> int:
        return self.both.nbytes


def _pack(weight: Tensor) -> Packed:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return Packed(packed, weight.nbytes)
