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
import math
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
import torch

from worker.compiled import compiler_problem
from worker.team import DONE, FIRST_ARGUMENT, PARTS, TAKEN, Task, compiled_task, has_team

_PARTS_PER_THREAD: Final = 8
"""Who is held up by another process does fewer."""
_AHEAD_BYTES: Final = 4096


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


_AT: Final = Arguments(*range(FIRST_ARGUMENT, FIRST_ARGUMENT + len(Arguments._fields)))
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
        self._work = _work(dtype == torch.bfloat16, is_gated)
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
        job[_AT.job] = address = ctypes.addressof(job)
        self._work.run_at(address, threads)


@cache
def product(dtype: torch.dtype, *, is_gated: bool) -> Product:
    """Compiled once."""
    return Product(dtype, is_gated=is_gated)


def _work(is_bfloat16: bool, is_gated: bool) -> Task:
    """Of a job as ``Arguments`` say."""
    from worker.models import block_code
    from worker.models.block_code import BLOCK_OUTPUTS, MOST_ROWS, TURN_BYTES, block_sums
    from worker.native import LANES, as_pointer, carray, float32, int64, take

    size = FIRST_ARGUMENT + len(_AT)
    width = BLOCK_OUTPUTS // 2 if is_gated else BLOCK_OUTPUTS
    log2_e, ln_2 = np.float32(1 / math.log(2)), np.float32(math.log(2))

    @compiled_task(is_bfloat16, is_gated, _AHEAD_BYTES, _AT, *block_code.SOURCES)
    def multiply(pointer: Any) -> None:
        job = carray(pointer, (size,), int64)
        count, inputs, outputs = job[_AT.row_count], job[_AT.inputs], job[_AT.outputs]
        turns, share = job[_AT.turns], job[_AT.share]
        results = carray(as_pointer(job[_AT.results], float32), (count, outputs), float32)
        bias = carray(as_pointer(job[_AT.bias], float32), (outputs,), float32)
        has_bias = job[_AT.bias] != 0
        blocks = (outputs + width - 1) // width
        block_bytes = turns * TURN_BYTES
        row_bytes = inputs * 4
        passes = (count + MOST_ROWS - 1) // MOST_ROWS
        sums = np.empty((MOST_ROWS, BLOCK_OUTPUTS), np.float32)
        power = np.empty(LANES, np.float32)
        power_bits = power.view(np.int32)
        while True:
            part = take(job[_AT.job] + 8 * TAKEN)
            if part >= job[PARTS]:
                break
            for block in range(part * share, min((part + 1) * share, blocks)):
                begin = block * width
                here = job[_AT.weights] + block * block_bytes
                for number in range(passes):
                    first = count * number // passes
                    end = count * (number + 1) // passes
                    # What is fetched meanwhile: what comes a little later, or, where the block is
                    # gone through several times, half of the next one each of the first two times.
                    ahead, ahead_bytes = here + _AHEAD_BYTES, TURN_BYTES
                    if passes > 1:
                        ahead, ahead_bytes = here, 0
                        if number < 2:
                            ahead = here + block_bytes + number * (block_bytes // 2)
                            ahead_bytes = TURN_BYTES // 2
                    block_sums(
                        job[_AT.rows] + first * row_bytes,
                        row_bytes,
                        end - first,
                        here,
                        turns,
                        ahead,
                        ahead_bytes,
                        sums.ctypes.data,
                        is_bfloat16,
                    )
                    for row in range(first, end):
                        total = sums[row - first]
                        if is_gated:
                            # 1 + e^-x; the exponential as in worker.attention.numba_backend.
                            for i in range(LANES):
                                z = min(-total[i] * log2_e, np.float32(126))
                                z = max(z, np.float32(-126))
                                n = np.floor(z + np.float32(0.5))
                                r = (z - n) * ln_2
                                power_bits[i] = (np.int32(n) + np.int32(127)) << np.int32(23)
                                p = np.float32(1 / 720)
                                p = p * r + np.float32(1 / 120)
                                p = p * r + np.float32(1 / 24)
                                p = p * r + np.float32(1 / 6)
                                p = p * r + np.float32(0.5)
                                p = p * r + np.float32(1)
                                p = p * r + np.float32(1)
                                gate = total[i] / (np.float32(1) + p * power[i])
                                total[i] = gate * total[LANES + i]
                        some = min(width, outputs - begin)
                        if has_bias:
                            for i in range(some):
                                total[i] += bias[begin + i]
                        for i in range(some):
                            results[row, begin + i] = total[i]
            take(job[_AT.job] + 8 * DONE)

    return multiply
