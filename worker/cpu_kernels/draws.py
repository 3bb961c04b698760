"""Token draws on the CPU, one row at a time, compiled by numba: see ``Sampler._draw``."""

import numpy as np
from numpy.typing import NDArray

from worker.cpu_kernels.team import FIRST_ARGUMENT, PARTS, WORTH_A_TEAM


def compile_draws() -> None:
    """Compile the loops while the worker loads, so that no request waits for the compiler."""
    from worker.cpu_kernels.draw_loops import draw

    draw()


def draw_rows(
    logits: NDArray[np.float32],
    temperature: NDArray[np.float32],
    least: NDArray[np.float32],
    top_k: NDArray[np.int64],
    top_p: NDArray[np.float32],
    draws: NDArray[np.float32],
    threads: int,
) -> NDArray[np.int64]:
    """Draw one token per row of ``logits``; see ``draw_loops.DrawArguments``."""
    from worker.cpu_kernels.draw_loops import AT, draw

    rows, vocabulary = logits.shape
    out = np.empty(rows, np.int64)
    arrays = [
        np.ascontiguousarray(array, kind)
        for array, kind in (
            (logits, np.float32),
            (temperature, np.float32),
            (least, np.float32),
            (top_k, np.int64),
            (top_p, np.float32),
            (draws, np.float32),
            (out, np.int64),
        )
    ]
    job = np.zeros(FIRST_ARGUMENT + len(AT), np.int64)
    job[PARTS] = rows
    addresses = (array.ctypes.data for array in arrays)
    job[FIRST_ARGUMENT:] = vocabulary, *addresses
    draw().run(job, min(threads, rows) if logits.size >= WORTH_A_TEAM else 1)
    return out
