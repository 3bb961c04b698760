"""Cuts decodes over tiles of keys into *spans* of a row, each of which is one part of a job.

::

    row 0   keys 0 … 255 | 256 … 300       parts 0, 1: their results are merged
    row 1   keys 0 … 63                    part 2
    row 2   keys 0 … 255 | 256 … 511 | …   parts 3, 4, …: spread over the threads

For each span ``tile_loops`` computes all scores, their exponentials and the weighted sum; spans are
merged as in Flash-Decoding (Dao et al. 2023). How a row is cut (``tile_loops.spans``) depends on
its own length only.
"""

from typing import Final, NamedTuple

from worker.cpu_kernels.team import FIRST_ARGUMENT

SPAN_TOKENS: Final = 256


class TileArguments(NamedTuple):
    """The fields of a job that follow its counters: addresses, and strides in elements."""

    job: int
    queries: int
    query_stride: int
    new: int
    new_stride: int
    pages: int
    out: int
    slots: int
    """[rows]: the pool's slot for each row's new keys and values."""
    table: int
    table_stride: int
    parts: int
    """[parts, 5]: row, first key, end, which partial result or -1, whether the row ends there."""
    partial: int
    """[partial results, heads, dim + 2] float32: weighted sum, largest score, sum of weights."""
    merged: int
    """[merged rows, 3]: row, its first partial result, the end of them."""
    merged_rows: int


AT: Final = TileArguments(*range(FIRST_ARGUMENT, FIRST_ARGUMENT + len(TileArguments._fields)))
"""Index of each of the ``TileArguments`` in a job."""
