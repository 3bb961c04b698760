"""Draws on the CPU, a row at a time, compiled by numba: see ``Sampler._draw``."""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from worker.compiled import Function, compiled

_BLOCK = 64


@cache
def draw() -> Function:
    """One token per row of ``logits`` [rows, vocabulary] float32, of the whole vocabulary.

    ``heats`` and ``least`` [rows]: temperature, and the least weight beside the likeliest token's;
    ``draws`` [rows] in [0, 1); ``out`` [rows] int64. The exponential is that of
    ``worker.attention.numba_backend``, with 0 where it is next to nothing.
    """
    block = _BLOCK
    log2_e, ln_2 = np.float32(1 / np.log(2)), np.float32(np.log(2))

    @compiled("(f4[:, ::1], f4[::1], f4[::1], f4[::1], i8[::1])", block)
    def draw(
        logits: NDArray[np.float32],
        heats: NDArray[np.float32],
        least: NDArray[np.float32],
        draws: NDArray[np.float32],
        out: NDArray[np.int64],
    ) -> None:
        rows, vocabulary = logits.shape
        weights = np.empty(vocabulary, np.float32)
        powers = np.empty(vocabulary, np.float32)
        power_bits = powers.view(np.int32)
        sums = np.empty((vocabulary + block - 1) // block, np.float64)
        for row in range(rows):
            top = np.float32(-np.inf)
            for i in range(vocabulary):
                top = max(top, logits[row, i])
            scale = log2_e / heats[row]
            for i in range(vocabulary):
                z = (logits[row, i] - top) * scale
                n = np.floor(max(z, np.float32(-126)) + np.float32(0.5))
                r = (max(z, np.float32(-126)) - n) * ln_2
                power_bits[i] = (np.int32(n) + np.int32(127)) << np.int32(23)
                p = np.float32(1 / 720)
                p = p * r + np.float32(1 / 120)
                p = p * r + np.float32(1 / 24)
                p = p * r + np.float32(1 / 6)
                p = p * r + np.float32(0.5)
                p = p * r + np.float32(1)
                weights[i] = p * r + np.float32(1) if z >= np.float32(-126) else np.float32(0)
            for i in range(vocabulary):
                weights[i] *= powers[i]
            if least[row] > 0:
                for i in range(vocabulary):
                    if weights[i] < least[row]:
                        weights[i] = 0
            total = np.float64(0)
            for b in range(len(sums)):
                part = np.float32(0)
                for i in range(b * block, min(vocabulary, b * block + block)):
                    part += weights[i]
                total += part
                sums[b] = total
            target = np.float64(draws[row]) * total
            # The first block, and in it the first token, whose sum is beyond the target; of a
            # broken model's NaNs none is, and the last token is one that there is at least.
            b = 0
            while b < len(sums) - 1 and not sums[b] > target:
                b += 1
            reached = sums[b - 1] if b else np.float64(0)  # what lies before the block
            picked = -1
            for i in range(b * block, min(vocabulary, b * block + block)):
                reached += weights[i]
                if weights[i] > 0:
                    picked = i
                    if reached > target:
                        break
            out[row] = picked if picked >= 0 else vocabulary - 1

    return draw
