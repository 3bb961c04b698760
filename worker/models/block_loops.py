"""What is compiled for ``block_products``. To be imported only where numba is installed.

The code that these are made of stands in the module's globals: numba's cache takes closures as
constants, and these would be new ones in every process.
"""

import math
from pathlib import Path
from typing import Any, Final

import numpy as np

from worker.models import amx_code, block_code
from worker.models.amx_code import LINES, TURN_INPUTS
from worker.models.block_code import BLOCK_OUTPUTS, begin, block_sums, end
from worker.models.block_products import AT, Form
from worker.native import (
    LANES,
    as_pointer,
    carray,
    float32,
    int64,
    jitable,
    look_at,
    pause,
    take,
    uint16,
    uint32,
)
from worker.team import DONE, FIRST_ARGUMENT, PARTS, TAKEN, Task, compiled_task

_SOURCE: Final = Path(__file__).read_bytes()
_AHEAD_BYTES: Final = 4096
_ROUNDED_AT_ONCE: Final = 4
"""Rows that one thread rounds while others do the next."""
_LOOKS: Final = 1000
"""Some 50 µs. Whoever has not rounded its rows by then is held up by another process."""


@jitable
def _round_rows(job: Any) -> None:
    """Write ``job``'s rows as AMX reads them, see ``Arguments.rounded``.

    Each thread does a few; then all wait for the last, or do everything again: it comes to the
    same, and another process may have that thread's core for long.
    """
    count, inputs, turns = job[AT.row_count], job[AT.inputs], job[AT.turns]
    exact = carray(as_pointer(job[AT.rows], uint32), (count, inputs), uint32)
    shape = ((count + LINES - 1) // LINES, turns, LINES, TURN_INPUTS)
    rounded = carray(as_pointer(job[AT.rounded], uint16), shape, uint16)
    begun, done = job[AT.job] + 8 * AT.rounding, job[AT.job] + 8 * AT.rounded_shares
    shares = (count + _ROUNDED_AT_ONCE - 1) // _ROUNDED_AT_ONCE
    share, is_again = take(begun), False
    while share < shares or not is_again:
        if share >= shares:
            for _ in range(_LOOKS):
                if look_at(done) >= shares:
                    return
                pause()
            share, is_again = 0, True
        first = share * _ROUNDED_AT_ONCE
        for row in range(first, min(count, first + _ROUNDED_AT_ONCE)):
            for turn in range(turns):
                line = rounded[row // LINES, turn, row % LINES]
                before = turn * TURN_INPUTS
                for i in range(TURN_INPUTS):
                    bits = np.uint32(0)
                    if before + i < inputs:
                        bits = exact[row, before + i]
                    # To the nearest, ties to even; a NaN stays one.
                    up = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
                    if (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000):
                        up = bits | np.uint32(0x400000)
                    line[i] = np.uint16(up >> np.uint32(16))
        if is_again:
            share += 1
        else:
            take(done)
            share = take(begun)


def multiply(form: int, is_gated: bool) -> Task:
    """Of a job as ``block_products.Arguments`` say, with weights of ``Form(form)``."""
    code = amx_code if form == Form.TILES else block_code
    most_rows, turn_bytes = code.MOST_ROWS, code.TURN_BYTES
    is_tiled = form == Form.TILES
    size = FIRST_ARGUMENT + len(AT)
    block_outputs = BLOCK_OUTPUTS // 2 if is_gated else BLOCK_OUTPUTS
    log2_e, ln_2 = np.float32(1 / math.log(2)), np.float32(math.log(2))

    @compiled_task(Form(form).name, is_gated, AT, _SOURCE, *block_code.SOURCES)
    def multiply(pointer: Any) -> None:
        job = carray(pointer, (size,), int64)
        count, inputs, outputs = job[AT.row_count], job[AT.inputs], job[AT.outputs]
        turns, share = job[AT.turns], job[AT.share]
        results = carray(as_pointer(job[AT.results], float32), (count, outputs), float32)
        bias = carray(as_pointer(job[AT.bias], float32), (outputs,), float32)
        has_bias = job[AT.bias] != 0
        blocks = (outputs + block_outputs - 1) // block_outputs
        block_bytes = turns * turn_bytes
        rows, row_bytes = job[AT.rows], 4 * inputs
        passes = (count + most_rows - 1) // most_rows
        sums = np.empty((most_rows, BLOCK_OUTPUTS), np.float32)
        power = np.empty(LANES, np.float32)
        power_bits = power.view(np.int32)
        if is_tiled:
            _round_rows(job)
            rows, row_bytes = job[AT.rounded], 2 * turns * TURN_INPUTS
        begin(form)
        while True:
            part = take(job[AT.job] + 8 * TAKEN)
            if part >= job[PARTS]:
                break
            for block in range(part * share, min((part + 1) * share, blocks)):
                output = block * block_outputs
                here = job[AT.weights] + block * block_bytes
                for number in range(passes):
                    if is_tiled:  # tiles are full, but for the last
                        first = most_rows * number
                        last = min(count, first + most_rows)
                    else:
                        first = count * number // passes
                        last = count * (number + 1) // passes
                    # What is fetched meanwhile: what comes a little later, or, where the block is
                    # gone through several times, half of the next one each of the first two times.
                    ahead, ahead_bytes = here + _AHEAD_BYTES, turn_bytes
                    if passes > 1:
                        ahead, ahead_bytes = here, 0
                        if number < 2:
                            ahead = here + block_bytes + number * (block_bytes // 2)
                            ahead_bytes = turn_bytes // 2
                    block_sums(
                        rows + first * row_bytes,
                        row_bytes,
                        last - first,
                        here,
                        turns,
                        ahead,
                        ahead_bytes,
                        sums.ctypes.data,
                        form,
                    )
                    for row in range(first, last):
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
                        some = min(block_outputs, outputs - output)
                        if has_bias:
                            for i in range(some):
                                total[i] += bias[output + i]
                        for i in range(some):
                            results[row, output + i] = total[i]
            take(job[AT.job] + 8 * DONE)
        end(form)

    return multiply
