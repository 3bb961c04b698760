"""What is compiled for ``block_products``. To be imported only where numba is installed.

The code that these are made of stands in the module's globals: numba's cache takes closures as
constants, and these would be new ones in every process.
"""

import math
from typing import Any, Final

import numpy as np

from worker.models import block_code
from worker.models.block_code import BLOCK_OUTPUTS, MOST_ROWS, TURN_BYTES, block_sums
from worker.models.block_products import AT
from worker.native import LANES, as_pointer, carray, float32, int64, take
from worker.team import DONE, FIRST_ARGUMENT, PARTS, TAKEN, Task, compiled_task

_AHEAD_BYTES: Final = 4096


def multiply(is_bfloat16: bool, is_gated: bool) -> Task:
    """Of a job as ``block_products.Arguments`` say."""
    size = FIRST_ARGUMENT + len(AT)
    width = BLOCK_OUTPUTS // 2 if is_gated else BLOCK_OUTPUTS
    log2_e, ln_2 = np.float32(1 / math.log(2)), np.float32(math.log(2))

    @compiled_task(is_bfloat16, is_gated, _AHEAD_BYTES, AT, *block_code.SOURCES)
    def multiply(pointer: Any) -> None:
        job = carray(pointer, (size,), int64)
        count, inputs, outputs = job[AT.row_count], job[AT.inputs], job[AT.outputs]
        turns, share = job[AT.turns], job[AT.share]
        results = carray(as_pointer(job[AT.results], float32), (count, outputs), float32)
        bias = carray(as_pointer(job[AT.bias], float32), (outputs,), float32)
        has_bias = job[AT.bias] != 0
        blocks = (outputs + width - 1) // width
        block_bytes = turns * TURN_BYTES
        row_bytes = inputs * 4
        passes = (count + MOST_ROWS - 1) // MOST_ROWS
        sums = np.empty((MOST_ROWS, BLOCK_OUTPUTS), np.float32)
        power = np.empty(LANES, np.float32)
        power_bits = power.view(np.int32)
        while True:
            part = take(job[AT.job] + 8 * TAKEN)
            if part >= job[PARTS]:
                break
            for block in range(part * share, min((part + 1) * share, blocks)):
                begin = block * width
                here = job[AT.weights] + block * block_bytes
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
                        job[AT.rows] + first * row_bytes,
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
            take(job[AT.job] + 8 * DONE)

    return multiply
