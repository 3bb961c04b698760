"""Loops that ``fused`` runs on the CPU: over rows of float32, compiled by numba.

Each function compiles its loop when it is first called, and returns it. Loops take addresses of
contiguous float32. To be imported only where numba is installed.
"""

from functools import cache

import numpy as np

from worker.cpu_kernels import native
from worker.cpu_kernels.compiled import Function, called_by_address
from worker.cpu_kernels.native import as_pointer, carray, float32


@cache
def add_norm() -> Function:
    """A loop (x, y, weight, out, rows, width, eps) for ``x += y``, ``out`` = RMS norm of ``x``; all
    [rows, width], ``weight`` [width]."""

    @called_by_address("aaaaiif", native.SOURCE)
    def add_norm(
        x_at: int, y_at: int, weight_at: int, out_at: int, rows: int, width: int, eps: float
    ) -> None:
        x = carray(as_pointer(x_at, float32), (rows, width), float32)
        y = carray(as_pointer(y_at, float32), (rows, width), float32)
        weight = carray(as_pointer(weight_at, float32), (width,), float32)
        out = carray(as_pointer(out_at, float32), (rows, width), float32)
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
    """A loop (x, cos, sin, tokens, heads, dim, rotated) that rotates the first ``rotated`` heads of
    ``x`` [tokens, heads, dim] by ``cos`` and ``sin`` [tokens, dim]; see ``AngleTable``."""

    @called_by_address("aaaiiii", native.SOURCE)
    def rotate(
        x_at: int, cos_at: int, sin_at: int, tokens: int, heads: int, dim: int, rotated: int
    ) -> None:
        x = carray(as_pointer(x_at, float32), (tokens, heads, dim), float32)
        cos = carray(as_pointer(cos_at, float32), (tokens, dim), float32)
        sin = carray(as_pointer(sin_at, float32), (tokens, dim), float32)
        half = dim // 2
        for token in range(tokens):
            for head in range(rotated):
                for i in range(half):
                    low, high = x[token, head, i], x[token, head, half + i]
                    x[token, head, i] = low * cos[token, i] + high * sin[token, i]
                    x[token, head, half + i] = (
                        high * cos[token, half + i] + low * sin[token, half + i]
                    )

    return rotate
