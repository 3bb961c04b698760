"""What a product in blocks is given: the form of its weights, and the fields of its job.

Apart from the products (``block_products``), so that the loops that numba compiles can read the
fields where it is installed, and others the forms where it is not.
"""

from enum import IntEnum
from typing import Final, NamedTuple

from worker.cpu_kernels.team import FIRST_ARGUMENT

PANEL_TURNS: Final = 8
"""Turns of a panel: with AMX their weights, 16 KiB, stay in the nearest cache for all rows."""


class Form(IntEnum):
    """The type of weights, and the unit that multiplies them."""

    FLOAT32 = 0
    BFLOAT16 = 1
    TILES = 2
    """bfloat16, multiplied by AMX."""
    DOTS = 3
    """bfloat16, multiplied in pairs by AVX-512's instruction for dot products."""

    @property
    def inputs_per_turn(self) -> int:
        """Inputs per turn of the inner loop; blocks are padded with zeros to a multiple of it."""
        return (1, 2, 32, 2)[self]


class ProductArguments(NamedTuple):
    """The fields of a job after its counts (``team``): addresses and sizes. Bias and results are
    float32."""

    job: int
    weights: int
    rows: int
    """[row_count, inputs] float32; bfloat16 for ``Form.DOTS``"""
    rounded: int
    """Room for the rows as AMX reads them, bfloat16 [row_count / 16][turns][16][32]: the last tile
    need not be full, the last turn ends with zeros."""
    rounding: int
    """Counter of shares of rows with started rounding."""
    rounded_shares: int
    """Counter of shares of rows with finished rounding."""
    bias: int
    """[outputs], padded to whole blocks; 0: none."""
    results: int
    """[row_count, outputs]"""
    row_count: int
    inputs: int
    outputs: int
    turns: int
    """Turns of the inner loop for a block."""
    panels: int
    """Number of panels into which a block's turns are divided."""
    passes_at_once: int
    """Passes, each of as many rows as fit registers, that go through a panel before the next."""
    blocks_at_once: int
    """Blocks that are computed for one panel before the next."""


AT: Final = ProductArguments(*range(FIRST_ARGUMENT, FIRST_ARGUMENT + len(ProductArguments._fields)))
