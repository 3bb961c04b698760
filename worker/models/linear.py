"""Linear layers by their layout in memory: dense, turned, mapped from the file, packed for oneDNN,
or int8. Weights in blocks for our own kernel, if there is one: ``worker.models.blocked``.

Measured on two cores (AMD, avx512_bf16), weights beyond the cache, bfloat16, share of the read
bandwidth: dense 0.5, packed 0.75 for one row and 0.95 for four. So packed layers want at least four
rows (``least_rows``). ``deterministic`` needs a row's sums to be independent of its place in a tile
of one size, which is tested at load (``TiledForward.check``), since CPUs differ in it.
"""

from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn.functional import linear

from worker.errors import UnsupportedModel
from worker.models.fused import gated

_INT8_INPUTS: Final = 64
_QUANTISE_ROWS: Final = 256
_INT8_OUTPUTS: Final = 16
_DEQUANTISE_ROWS: Final = 64
"""Rows from which an int8 product costs more than converting the weights to float first."""


class Linear(Protocol):
    """A linear layer, or a gated pair of them."""

    def __call__(self, x: Tensor) -> Tensor:
        """Map ``x`` [rows, in] to [rows, out]."""

    @property
    def nbytes(self) -> int:
        """Bytes that one use reads."""


class Format(Protocol):
    """Makes layers from weights [out, in] of one type."""

    @property
    def least_rows(self) -> int:
        """Rows below which a product costs as much, or more."""

    @property
    def tile_rows(self) -> int:
        """Rows multiplied at a time: one row beyond a tile costs as much as a whole one."""

    @property
    def rows_dtype(self) -> torch.dtype | None:
        """Type of its layers' rows, results and biases; None: the weights' own type."""

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear: ...

    def gated(self, weight: Tensor) -> Linear:
        """Make a layer x → silu(x Gᵀ) * (x Uᵀ); ``weight`` is G and U, stacked."""


class DenseFormat:
    """A ``Format`` that leaves weights as they are."""

    least_rows = 1
    tile_rows = 1
    rows_dtype = None

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return DenseLinear(weight, bias)

    def gated(self, weight: Tensor) -> Linear:
        return SplitGated(self.linear(weight, None))


class TurnedFormat(DenseFormat):
    """A ``Format`` of weights as [in, out] in memory, which BLAS reads in order for a few rows.

    Measured on two cores (Intel, AVX-512), float32 and one thread, 4 to 32 rows: 1.2 to 1.9 times
    as fast as [out, in], and equal at one row and for long prompts.
    """

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return DenseLinear(weight.t().contiguous().t(), bias)


class PackedFormat:
    """A ``Format`` of weights in oneDNN's own order, which is a copy of them."""

    least_rows = 4
    tile_rows = 1
    rows_dtype = None

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return PackedLinear(_pack(weight), bias)

    def gated(self, weight: Tensor) -> Linear:
        # Packed apart, so that activation and product are fused with the matrix products.
        gate, up = weight.chunk(2)
        return PackedGated(_pack(gate), _pack(up))


class Int8Format(DenseFormat):
    """A ``Format`` of int8 weights, one scale per output (symmetric, largest magnitude at 127).

    A layer with an odd number of outputs (some vocabularies) stays dense. Raises
    ``UnsupportedModel`` for inputs that are not a multiple of 64: torch's kernel reads beyond them.
    """

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        out, into = weight.shape
        if into % _INT8_INPUTS:
            raise UnsupportedModel(
                f"quantize=int8 needs layers whose inputs are a multiple of {_INT8_INPUTS}, this"
                f" model has one with {into}; set TIDEGATE_WORKER__QUANTIZE=none"
            )
        if out % _INT8_OUTPUTS:
            return DenseLinear(weight, bias)
        return Int8Linear(*quantise(weight), bias)


def packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN on this CPU has packed layers of that type."""
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
    """A weight in oneDNN's order; ``nbytes`` is its own, without the padding of odd shapes."""

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
class Int8Linear:
    """A layer of ``weight`` int8 [out, in] and ``scales`` [out] of the activations' type."""

    weight: Tensor
    scales: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        if len(x) >= _DEQUANTISE_ROWS:
            return linear(x, self.weight.to(x.dtype).mul_(self.scales[:, None]), self.bias)
        out = torch._weight_int8pack_mm(x, self.weight, self.scales)
        return out if self.bias is None else out.add_(self.bias)

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes + self.scales.nbytes


@dataclass(frozen=True, slots=True)
class SplitGated:
    """A gated layer over one linear layer with the outputs gate and up."""

    both: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return gated(self.both(x))

    @property
    def nbytes(self) -> int:
        return self.both.nbytes


def quantise(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round ``weight`` to int8 [out, in], with scales [out] in the type of ``weight``."""
    # Divided by the rounded scale, which compensates for its rounding.
    largest = torch.maximum(weight.amax(dim=1), -weight.amin(dim=1))
    scales = (largest.float() / 127).clamp_(min=1e-12).to(weight.dtype)
    rounded = torch.empty(weight.shape, dtype=torch.int8)
    # In pieces: a whole layer in float32, twice, would take more memory than the layer.
    for first in range(0, len(weight), _QUANTISE_ROWS):
        rows = slice(first, first + _QUANTISE_ROWS)
        steps = weight[rows].float() / scales[rows].float()[:, None]
        rounded[rows] = steps.round_().clamp_(-127, 127).to(torch.int8)
    return rounded, scales


def _pack(weight: Tensor) -> Packed:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
    return Packed(packed, weight.nbytes)
