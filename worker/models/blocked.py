"""Linear layers with weights in the blocks of ``block_products``."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from worker.cpu_kernels.block_job import Form
from worker.cpu_kernels.block_products import (
    TILE_ROWS,
    fastest_form,
    product,
    products_problem,
)
from worker.log import model_log
from worker.models.linear import Format, Linear
from worker.models.malloc import advise_huge_pages

_BLOCK: Final = 32


def blocks_fit(dtype: torch.dtype) -> bool:
    """Whether ``BlockedFormat`` supports weights of ``dtype`` here; logs the reason if it does not.

    Compiles its products, so that no request waits for the compiler.
    """
    if dtype not in (torch.bfloat16, torch.float32):
        return False
    problem = products_problem()
    if problem is None:
        try:
            form = fastest_form(dtype)
            product(form, is_gated=False)
            product(form, is_gated=True)
        except Exception as error:  # any compiler error
            problem = f"{type(error).__name__}: {error}"
    if problem is not None:
        model_log.info("matrix products are left to oneDNN or BLAS: %s", problem)
    return problem is None


class BlockedFormat(Format):
    """For bfloat16 and float32, on CPUs for which ``products_problem`` is None.

    Rows and results are always float32: sums are float32 anyway, and it also makes the operations
    between two products faster.

    Measured against oneDNN's packed layers (two cores, Intel, bfloat16, the products of a 0.5B
    model): 1.4 times as fast at one row, 1.3 at 4, 1.6 at 8 to 32, 1.45 at 512. For float32 (the
    steps of a small model): 1.4, 1.3, 1.3 to 1.1, and 0.85. Both with AMX (whole steps): 1.5 at one
    row, 1.5 at 8, 1.6 at 32, 1.9 at 64, 1.2 in prompts of 512. AMX multiplies bfloat16: rows are
    rounded to it.
    """

    rows_dtype = torch.float32

    def __init__(self, form: Form | None = None) -> None:
        """``form``: the form of bfloat16 weights; by default ``fastest_form``."""
        self._form = fastest_form(torch.bfloat16) if form is None else form
        # float32 has no tiles, but its chunks have this size too.
        self.tile_rows = TILE_ROWS if self._form == Form.TILES else 1

    def linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        return _layer((weight,), bias, weight.nbytes, self._form)

    def gated(self, weight: Tensor) -> Linear:
        return _layer(weight.chunk(2), None, weight.nbytes, self._form)


@dataclass(frozen=True, slots=True)
class BlockedLinear:
    """A linear layer of ``blocks`` int32, see ``block_products``; ``nbytes`` counts the weights,
    without the padding of odd shapes."""

    blocks: Tensor
    bias: Tensor | None
    form: Form
    inputs: int
    outputs: int
    nbytes: int
    is_gated: bool

    def __call__(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32 or x.shape[1] != self.inputs:
            raise ValueError(f"expected rows of {self.inputs} float32, not {x.shape[1]} {x.dtype}")
        bias = 0 if self.bias is None else self.bias.data_ptr()
        multiply = product(self.form, is_gated=self.is_gated)
        return multiply(self.blocks.data_ptr(), x, bias, self.outputs)


class DottedLinear(BlockedLinear):
    """A layer of ``Form.DOTS``: it rounds rows to bfloat16, so digests contain its name."""

    __slots__ = ()


def _layer(
    weights: Sequence[Tensor], bias: Tensor | None, nbytes: int, form: Form
) -> BlockedLinear:
    outputs, inputs = weights[0].shape
    if inputs % 2 and weights[0].dtype == torch.bfloat16:  # no pairs of inputs
        weights = [weight.float() for weight in weights]
    if weights[0].dtype == torch.float32:
        form = Form.FLOAT32
    is_gated = len(weights) == 2
    product(form, is_gated=is_gated)  # odd inputs may need a product that is not compiled yet
    padding = -inputs % form.inputs_per_turn
    if padding:
        weights = [pad(weight, (0, padding)) for weight in weights]
    if bias is not None:
        bias = pad(bias, (0, -outputs % _BLOCK)).contiguous()
    blocks = _blocks([weight.contiguous().view(torch.int32) for weight in weights])
    kind = DottedLinear if form == Form.DOTS else BlockedLinear
    return kind(blocks, bias, form, inputs, outputs, nbytes, is_gated)


def _blocks(weights: Sequence[Tensor]) -> Tensor:
    """Blocks of one or two matrices [outputs, words of 4 bytes], which share each block."""
    outputs, words = weights[0].shape
    width = _BLOCK // len(weights)
    whole, rest = divmod(outputs, width)
    blocks = torch.empty((whole + (rest > 0), words, _BLOCK), dtype=torch.int32)
    advise_huge_pages(blocks.data_ptr(), blocks.nbytes)
    for i, weight in enumerate(weights):
        mine = blocks[..., i * width : (i + 1) * width]
        mine[:whole] = weight[: whole * width].view(whole, width, words).transpose(1, 2)
        if rest:
            mine[whole, :, :rest] = weight[whole * width :].t()
            mine[whole, :, rest:] = 0
    return blocks
