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


class Format:
    """Makes layers from weights [out, in] of one dtype."""

    least_rows: int = 1
    """Number of rows below which a product costs as much or more."""
    tile_rows: int = 1
    """Rows multiplied at a time: one row past a full tile costs as much as a whole tile."""
    rows_dtype: torch.dtype | None = None
    """Dtype of its layers' rows, results and biases; None: the weights' dtype."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        raise NotImplementedError

    def gated(self, weight: Tensor) -> Linear:
        """Make a layer x → silu(x Gᵀ) * (x Uᵀ); ``weight`` is G and U, stacked."""
        return SplitGated(self.linear(weight, None))


class DenseFormat(Format):
    """Keeps weights unchanged."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return DenseLinear(weight, bias)


class TurnedFormat(Format):
    """Stores weights as [in, out], which BLAS reads in order for a few rows.

    Measured on two cores (Intel, AVX-512), float32, one thread, 4 to 32 rows: 1.2 to 1.9 times as
    fast as [out, in]; equally fast at one row and for long prompts.
    """

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return DenseLinear(weight.t().contiguous().t(), bias)


class PackedFormat(Format):
    """Copies weights into oneDNN's own order."""

    least_rows = 4

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return PackedLinear(_pack(weight), bias, weight.nbytes)

    def gated(self, weight: Tensor) -> Linear:
        # Packed separately, so that oneDNN fuses activation and product with the matrix products.
        gate, up = weight.chunk(2)
        return PackedGated(_pack(gate), _pack(up), weight.nbytes)


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
class PackedLinear:
    """``weight`` is in oneDNN's order; ``nbytes`` excludes the padding of odd shapes."""

    weight: Tensor
    bias: Tensor | None
    nbytes: int

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = _linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out


@dataclass(frozen=True, slots=True)
class PackedGated:
    gate: Tensor
    up: Tensor
    nbytes: int

    def __call__(self, x: Tensor) -> Tensor:
        gate = _linear_pointwise(x, self.gate, None, "swish", [], "")
        out: Tensor = _linear_binary(x, gate, self.up, None, "mul")
        return out


@dataclass(frozen=True, slots=True)
class SplitGated:
    """A gated layer over one linear layer whose outputs are gate and up."""

    both: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return gated(self.both(x))

    @property
    def nbytes(self) -> int:
        return self.both.nbytes


def _pack(weight: Tensor) -> Tensor:
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return packed
