"""Compiled tasks on torch's threads."""

from typing import Any

import numpy as np
import pytest

from worker.cpu_kernels import compiled
from worker.cpu_kernels.team import DONE, FIRST_ARGUMENT, PARTS, TAKEN, compiled_task

if compiled.compiler_problem() is not None:
    pytest.skip("nothing is compiled here", allow_module_level=True)
from worker.cpu_kernels.native import array_at, carray, int64, take

SIZE = FIRST_ARGUMENT + 3


@compiled_task(SIZE)
def fill(pointer: Any) -> None:
    """Write its number to each part; the part that the job names asks for far too much memory."""
    job = carray(pointer, (SIZE,), int64)
    out = array_at(job[FIRST_ARGUMENT + 1], int64, job[PARTS])
    while True:
        part = take(job[FIRST_ARGUMENT] + 8 * TAKEN)
        if part >= job[PARTS]:
            break
        scratch = np.empty(2**58 if part == job[FIRST_ARGUMENT + 2] else 1, np.int64)
        scratch[0] = part
        out[part] = scratch[0]
        take(job[FIRST_ARGUMENT] + 8 * DONE)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # numba prints it
@pytest.mark.parametrize("threads", [1, 2])
def test_a_part_that_finds_no_memory_is_an_error_and_not_a_result(threads: int) -> None:
    out = np.full(5, -1)
    job = np.zeros(SIZE, np.int64)
    job[PARTS] = len(out)
    job[FIRST_ARGUMENT:] = job.ctypes.data, out.ctypes.data, -1
    fill.run(job, threads)
    assert out.tolist() == [0, 1, 2, 3, 4]
    job[FIRST_ARGUMENT + 2] = 3
    with pytest.raises(MemoryError, match="fill"):
        fill.run(job, threads)
    job[FIRST_ARGUMENT + 2] = -1
    fill.run(job, threads)
