"""The loops between the products of a decoder's step, and the task that runs jobs in order.

Import this module only if numba is installed.
"""

from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from worker.cpu_kernels import native
from worker.cpu_kernels.native import (
    array_at,
    call_task,
    carray,
    float32,
    int64,
    is_done,
    jitable,
    parts_of,
    store,
    uint16,
)
from worker.cpu_kernels.team import FIRST_ARGUMENT, PARTS, TeamTask, compiled_task


class RowArguments(NamedTuple):
    """The fields of a job over rows, after its counts: addresses of contiguous float32, then sizes.

    Results go to ``out``, rounded to bfloat16 if ``is_short``.
    """

    rows: int
    """Number of rows, divided among the parts."""
    x: int
    y: int
    weight: int
    sums: int
    out: int
    is_short: int
    width: int
    heads: int
    rotated: int
    epsilon: int
    """The bits of a float64."""


AT: Final = RowArguments(*range(FIRST_ARGUMENT, FIRST_ARGUMENT + len(RowArguments._fields)))
SIZE: Final = FIRST_ARGUMENT + len(AT)
_SOURCE: Final = Path(__file__).read_bytes()


@jitable
def _rows_of(job: Any, part: Any) -> Any:
    count, parts = job[AT.rows], job[PARTS]
    return count * part // parts, count * (part + 1) // parts


@jitable
def _norm_of(values: Any, epsilon: Any) -> Any:
    """The factor of ``values`` in their RMS norm."""
    squares = np.float32(0)
    for i in range(len(values)):
        squares += values[i] * values[i]
    return np.float32(1 / np.sqrt(squares / len(values) + epsilon))


@cache
def add_norm() -> TeamTask:
    """Compile ``sums`` (may be ``x``) = ``x`` + ``y``; the results are the RMS norm of ``sums``.
    All are [rows, ``width``], ``weight`` is [``width``]."""

    @compiled_task(AT, native.SOURCE, _SOURCE)
    def add_norm(pointer: Any) -> None:
        job = carray(pointer, (SIZE,), int64)
        width = job[AT.width]
        epsilon = job.view(np.float64)[AT.epsilon]
        weight = array_at(job[AT.weight], float32, width)
        normed = np.empty(width, np.float32)
        for part in parts_of(job):
            begin, end = _rows_of(job, part)
            for row in range(begin, end):
                at = row * width
                x = array_at(job[AT.x] + 4 * at, float32, width)
                y = array_at(job[AT.y] + 4 * at, float32, width)
                sums = array_at(job[AT.sums] + 4 * at, float32, width)
                for i in range(width):
                    sums[i] = x[i] + y[i]
                scale = _norm_of(sums, epsilon)
                for i in range(width):
                    normed[i] = sums[i] * scale * weight[i]
                store(normed, job[AT.out], job[AT.is_short], at)

    return add_norm


@cache
def rotate() -> TeamTask:
    """Compile the rotation of the first ``rotated`` heads of ``x`` [rows, ``heads``, ``width``] by
    cosines ``y`` and signed sines ``weight`` [rows, ``width``] (``AngleTable``), after an RMS norm
    of each head by ``sums`` [``rotated``, ``width``] (0: no norm). ``out`` may be ``x``."""

    @compiled_task(AT, native.SOURCE, _SOURCE)
    def rotate(pointer: Any) -> None:
        job = carray(pointer, (SIZE,), int64)
        heads, width, half = job[AT.heads], job[AT.width], job[AT.width] // 2
        if job[AT.out] == job[AT.x]:
            heads = job[AT.rotated]  # the others are already in place
        epsilon = job.view(np.float64)[AT.epsilon]
        given, turned = np.empty(width, np.float32), np.empty(width, np.float32)
        for part in parts_of(job):
            begin, end = _rows_of(job, part)
            for row in range(begin, end):
                cos = array_at(job[AT.y] + 4 * row * width, float32, width)
                sin = array_at(job[AT.weight] + 4 * row * width, float32, width)
                for head in range(heads):
                    at = (row * job[AT.heads] + head) * width
                    x = array_at(job[AT.x] + 4 * at, float32, width)
                    if head >= job[AT.rotated]:
                        store(x, job[AT.out], job[AT.is_short], at)
                        continue
                    for i in range(width):
                        given[i] = x[i]
                    if job[AT.sums] != 0:
                        norm = job[AT.sums] + 4 * head * width
                        weight = array_at(norm, float32, width)
                        scale = _norm_of(given, epsilon)
                        for i in range(width):
                            given[i] *= scale * weight[i]
                    for i in range(half):
                        low, high = given[i], given[half + i]
                        turned[i] = low * cos[i] + high * sin[i]
                        turned[half + i] = high * cos[half + i] + low * sin[half + i]
                    store(turned, job[AT.out], job[AT.is_short], at)

    return rotate


@cache
def convert(is_short: bool) -> TeamTask:
    """Compile the copy of ``x`` [rows, ``width``], bfloat16 if ``is_short``, to the results."""
    item = 2 if is_short else 4

    @compiled_task(is_short, AT, native.SOURCE, _SOURCE)
    def convert(pointer: Any) -> None:
        job = carray(pointer, (SIZE,), int64)
        width = job[AT.width]
        values = np.empty(width, np.float32)
        bits = values.view(np.uint32)
        for part in parts_of(job):
            begin, end = _rows_of(job, part)
            for row in range(begin, end):
                x = job[AT.x] + item * row * width
                if is_short:
                    short = array_at(x, uint16, width)
                    for i in range(width):
                        bits[i] = np.uint32(short[i]) << np.uint32(16)
                    store(values, job[AT.out], job[AT.is_short], row * width)
                else:
                    exact = array_at(x, float32, width)
                    store(exact, job[AT.out], job[AT.is_short], row * width)

    return convert


@cache
def in_turn() -> TeamTask:
    """Compile the task that runs other tasks in order. After its counts, its job has the address
    and the number of pairs; each pair is a task's address and its job's address. A thread that
    lacks memory for its part stops."""
    size = FIRST_ARGUMENT + 2

    @compiled_task(native.SOURCE, _SOURCE)
    def in_turn(pointer: Any) -> None:
        job = carray(pointer, (size,), int64)
        pairs, count = job[FIRST_ARGUMENT], job[FIRST_ARGUMENT + 1]
        tasks = array_at(pairs, int64, (count, 2))
        for i in range(count):
            call_task(tasks[i, 0], tasks[i, 1])
            if not is_done(tasks[i, 1]):
                break

    return in_turn
