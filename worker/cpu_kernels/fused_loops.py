"""Loops that ``fused`` runs on the CPU: over rows, compiled by numba for float32.

Each function compiles its loop when it is first called, and returns it.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from worker.cpu_kernels.compiled import Function, compiled


@cache
def add_norm() -> Function:
    """A loop for ``x += y``, ``out`` = RMS norm of ``x``; all [rows, width], ``weight`` [width]."""

    @compiled("(f4[:, ::1], f4[:, ::1], f4[::1], f8, f4[:, ::1])")
    def add_norm(
        x: NDArray[np.float32],
        y: NDArray[np.float32],
        weight: NDArray[np.float32],
        eps: float,
        out: NDArray[np.float32],
    ) -> None:
        rows, width = x.shape
        for row in range(rows):
            squares = np.float32(0)
            for i in range(width):
                value = x[row, i] + y[row, i]
                x[row, i] = value
                squares += value * value
            scale = np.float32(1 / np.sqrt(squares / width + eps))
            for i in range(width):
                out[row, i] = x[row, i] * scale * weight[i]

    return add_norm


@cache
def rotate() -> Function:
    """A loop that rotates the first ``heads`` of ``x`` [tokens, heads, dim]; see ``AngleTable``."""

    @compiled("(f4[:, :, ::1], i8, f4[:, :, ::1], f4[:, :, ::1])")
    def rotate(
        x: NDArray[np.float32], heads: int, cos: NDArray[np.float32], sin: NDArray[np.float32]
    ) -> None:
        half = x.shape[2] // 2
        for token in range(len(x)):
            for head in range(heads):
                for i in range(half):
                    low, high = x[token, head, i], x[token, head, half + i]
                    x[token, head, i] = low * cos[token, 0, i] + high * sin[token, 0, i]
                    x[token, head, half + i] = (
                        high * cos[token, 0, half + i] + low * sin[token, 0, half + i]
                    )

    return rotate
