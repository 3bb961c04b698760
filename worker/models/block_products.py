"""Products of few rows with weights in blocks, compiled by numba for CPUs with AVX-512.

A step of few rows takes as long as its weights take to be read, so they lie in the order in which
they are used, and are read once::

    weights  [outputs / 32][inputs / 2][32 outputs][2]   bfloat16, a pair of inputs side by side
             [outputs / 32][inputs]    [32 outputs]      float32
    gated    the same, a block being 16 of the gate's outputs and then 16 of the other's

Sums of 32 outputs and up to 12 rows stay in registers. bfloat16 is widened to float32 (a shift, a
mask) and summed by plain multiply-adds: on Intel (Emerald Rapids) that is 1.7 times the rate of its
bfloat16 instruction, which gives a result every other cycle, and it needs no more than AVX-512.
Each sum runs over the inputs in order, whatever the number of rows.
"""

import ctypes
from functools import cache
from typing import Final, NamedTuple

import torch

from worker.compiled import compiler_problem
from worker.team import FIRST_ARGUMENT, has_team

_PARTS_PER_THREAD: Final = 8
"""Who is held up by another process does fewer."""


class Arguments(NamedTuple):
    """A job after its two counters: addresses and sizes. Rows, bias and results are float32."""

    job: int
    weights: int
    rows: int
    """[row_count, inputs]"""
    bias: int
    """[outputs], or 0: none."""
    results: int
    """[row_count, outputs]"""
    row_count: int
    inputs: int
    outputs: int
    turns: int
    """Of the inner loop for a block."""
    share: int
    """Blocks of a part."""


AT: Final = Arguments(*range(FIRST_ARGUMENT, FIRST_ARGUMENT + len(Arguments._fields)))
_Job = ctypes.c_int64 * (FIRST_ARGUMENT + len(Arguments._fields))


def products_problem() -> str | None:
    """Why this machine cannot have them, or None."""
    if (problem := compiler_problem()) is not None:
        return problem
    from llvmlite import binding

    if not binding.get_host_cpu_features().get("avx512f", False):
        return "the CPU has no AVX-512"
    if not has_team():
        return "torch's OpenMP is out of reach"
    return None


class Product:
    """Results of rows: · weightsᵀ + bias; gated: silu of the first product times the second."""

    def __init__(self, dtype: torch.dtype, *, is_gated: bool) -> None:
        """Compiles. ``dtype`` of the weights: bfloat16 or float32."""
        from worker.models.block_loops import multiply

        self._work = multiply(dtype == torch.bfloat16, is_gated)
        self._inputs_per_turn = 2 if dtype == torch.bfloat16 else 1
        self._outputs_per_block = 16 if is_gated else 32

    def __call__(
        self, weights: int, rows: int, bias: int, results: int, shape: tuple[int, int, int]
    ) -> None:
        """Addresses as of ``Arguments``; ``shape``: rows, inputs, outputs. Without the GIL."""
        threads = torch.get_num_threads()
        count, inputs, outputs = shape
        blocks = -(-outputs // self._outputs_per_block)
        share = max(1, blocks // (threads * _PARTS_PER_THREAD))
        turns = -(-inputs // self._inputs_per_turn)
        job = _Job(
            *(0, -(-blocks // share), 0),
            *Arguments(0, weights, rows, bias, results, count, inputs, outputs, turns, share),
        )
        job[AT.job] = address = ctypes.addressof(job)
        self._work.run_at(address, threads)


@cache
def product(dtype: torch.dtype, *, is_gated: bool) -> Product:
    """Compiled once."""
    return Product(dtype, is_gated=is_gated)
