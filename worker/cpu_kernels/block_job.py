"""The inputs of a product in blocks: the form of its weights and the fields of its job.

Separate from the products (``block_products``): loops that numba compiles can import the fields,
and other modules can import the forms without numba.
"""

from enum import IntEnum
from typing import Final, NamedTuple

from worker.cpu_kernels.team import FIRST_ARGUMENT

PANEL_TURNS: Final = 8
"""Turns per panel: with AMX, a panel's 16 KiB of weights stay in the L1 cache for all rows."""


class Form(IntEnum):
    """The dtype of the weights and the unit that multiplies them."""

    FLOAT32 = 0
    BFLOAT16 = 1
    TILES = 2
    """bfloat16, multiplied by AMX."""
    DOTS = 3
    """bfloat16, multiplied in pairs by AVX-512's dot product instruction."""

    @property
    def inputs_per_turn(self) -> int:
        """Inputs per turn of the inner loop; blocks are padded with zeros to a multiple of that."""
        return (1, 2, 32, 2)[self]


class ProductArguments(NamedTuple):
    """The fields of a job after its counts (``team``): addresses and sizes. Bias and results are
    float32."""

    weights: int
    rows: int
    """[row_count, inputs] float32; bfloat16 for ``Form.DOTS``"""
    rounded: int
    """Buffer for the rows in AMX's layout, bfloat16 [row_count / 16][turns][16][32]: the last tile
    may be partly filled, and the last turn is padded with zeros."""
    rounding: int
    """Counter of row shares whose rounding has started."""
    rounded_shares: int
    """Counter of row shares whose rounding has finished."""
    bias: int
    """[outputs], padded to whole blocks; 0: none."""
    results: int
    """[row_count, outputs]"""
    row_count: int
    inputs: int
    outputs: int
    turns: int
    """Turns of the inner loop per block."""
    panels: int
    """Number of panels into which a block's turns are divided."""
    passes_at_once: int
    """Passes, each of as many rows as fit in registers, that read a panel before the next panel."""
    blocks_at_once: int
    """Blocks that are computed for one panel before the next panel."""


AT: Final = ProductArguments(*range(FIRST_ARGUMENT, FIRST_ARGUMENT + len(ProductArguments._fields)))
