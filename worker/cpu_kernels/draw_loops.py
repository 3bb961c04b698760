"""The compiled loops of ``draws``. Import this module only if numba is installed.

The code is in the module's globals, as in ``worker.cpu_kernels.block_loops``.
"""

from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from worker.cpu_kernels import native
from worker.cpu_kernels.compiled import compiled
from worker.cpu_kernels.native import (
    LANES,
    array_at,
    carray,
    float32,
    int64,
    largest,
    parts_of,
    small_power,
)
from worker.cpu_kernels.team import FIRST_ARGUMENT, PARTS, TeamTask, compiled_task

_BLOCK: Final = 64
_BUCKET_BITS: Final = 18
"""Low bits of a float32 weight that its bucket ignores: 4,065 buckets, 32 per power of two."""
_FINE_BITS: Final = 9
_MASK: Final = (1 << _FINE_BITS) - 1
_BUCKETS: Final = (127 << 23 >> _BUCKET_BITS) + 1
_GIVEN: Final = "f4[::1], u4[::1], f8[::1], i8[::1]"


class DrawArguments(NamedTuple):
    """The fields of a job, with one part per row, after its counters: addresses and ``vocabulary``.

    All are [rows] float32, except ``top_k`` and ``out`` (int64) and ``logits`` [rows, vocabulary].
    ``least``: minimum weight relative to the likeliest token's; ``draws`` in [0, 1); for ``top_k``
    and ``top_p`` see ``filters.kept_``.
    """

    vocabulary: int
    logits: int
    temperature: int
    least: int
    top_k: int
    top_p: int
    draws: int
    out: int


AT: Final = DrawArguments(*range(FIRST_ARGUMENT, FIRST_ARGUMENT + len(DrawArguments._fields)))
"""Index of each of the ``DrawArguments`` in a job."""


@compiled(f"Tuple((f4, i8, f8))({_GIVEN}, i8, f8)", _BUCKET_BITS, _FINE_BITS, _BUCKETS)
def edge(
    weights: NDArray[np.float32],
    bits: NDArray[np.uint32],
    sums: NDArray[np.float64],
    counts: NDArray[np.int64],
    most: int,
    share: float,
) -> tuple[Any, int, Any]:
    """Find the edge of the largest ``weights``, the ones that top-k and top-p keep.

    In descending order (equal weights by ascending id), a token stays while fewer than ``most``
    precede it and their sum is less than ``share``. Returns the last token's weight, how many of
    that weight stay, and the sum of all that stay. It needs no sort: the weights' bits sort like
    the weights, so sums over buckets, and over finer buckets within the one at the edge, find it.
    ``bits`` are the weights' bits; ``sums`` and ``counts`` have room for the buckets.
    """
    sums[:] = 0
    counts[:] = 0
    for i in range(len(weights)):
        bucket = np.int64(bits[i] >> np.uint32(_BUCKET_BITS))
        sums[bucket] += weights[i]
        counts[bucket] += 1
    before, ahead = np.float64(0), 0
    found = _BUCKETS - 1
    while found > 0:
        if counts[found] and (before + sums[found] >= share or ahead + counts[found] >= most):
            break
        before += sums[found]
        ahead += counts[found]
        found -= 1
    inside = np.empty(counts[found], np.uint32)
    n = 0
    for i in range(len(weights)):
        if np.int64(bits[i] >> np.uint32(_BUCKET_BITS)) == found:
            inside[n] = bits[i]
            n += 1
    value = np.empty(1, np.float32)
    value_bits = value.view(np.uint32)
    prefix = np.int64(found)
    for shift in (_BUCKET_BITS - _FINE_BITS, _BUCKET_BITS - 2 * _FINE_BITS):
        sums[: _MASK + 1] = 0
        counts[: _MASK + 1] = 0
        for k in range(n):
            if np.int64(inside[k] >> np.uint32(shift + _FINE_BITS)) == prefix:
                bucket = np.int64(inside[k] >> np.uint32(shift)) & _MASK
                value_bits[0] = inside[k]
                sums[bucket] += value[0]
                counts[bucket] += 1
        lowest = 0
        while lowest < _MASK and counts[lowest] == 0:
            lowest += 1
        at = _MASK
        while at > lowest:
            if counts[at] and (before + sums[at] >= share or ahead + counts[at] >= most):
                break
            before += sums[at]
            ahead += counts[at]
            at -= 1
        prefix = (prefix << _FINE_BITS) | at
    value_bits[0] = np.uint32(prefix)
    equals = 0
    while equals < counts[prefix & _MASK] and ahead < most and (before < share or ahead == 0):
        before += value[0]
        ahead += 1
        equals += 1
    return value[0], equals, before


@cache
def draw() -> TeamTask:
    """Compile the draw of one token per row of a job (``DrawArguments``).

    The exponential is the one of ``attention_loops``, but 0 below 2^-126.
    """
    block, size, buckets = _BLOCK, FIRST_ARGUMENT + len(AT), _BUCKETS
    log2_e, ln_2 = np.float32(1 / np.log(2)), np.float32(np.log(2))

    @compiled_task(
        block, buckets, _BUCKET_BITS, _FINE_BITS, AT, native.SOURCE, Path(__file__).read_bytes()
    )
    def draw(pointer: Any) -> None:
        job = carray(pointer, (size,), int64)
        rows, vocabulary = job[PARTS], job[AT.vocabulary]
        heats = array_at(job[AT.temperature], float32, rows)
        leasts = array_at(job[AT.least], float32, rows)
        top_ks = array_at(job[AT.top_k], int64, rows)
        top_ps = array_at(job[AT.top_p], float32, rows)
        draws = array_at(job[AT.draws], float32, rows)
        out = array_at(job[AT.out], int64, rows)
        weights = np.empty(vocabulary, np.float32)
        bits = weights.view(np.uint32)
        powers = np.empty(vocabulary, np.float32)
        power_bits = powers.view(np.int32)
        sums = np.empty((vocabulary + block - 1) // block, np.float64)
        bucket_sums = np.empty(buckets, np.float64)
        bucket_counts = np.empty(buckets, np.int64)
        for row in parts_of(job):
            address = job[AT.logits] + 4 * row * vocabulary
            logits = array_at(address, float32, vocabulary)
            top = logits[0]
            tiles = vocabulary // LANES
            if tiles:
                top = largest(address, tiles)
            for i in range(tiles * LANES, vocabulary):
                top = max(top, logits[i])
            scale = log2_e / heats[row]
            for i in range(vocabulary):
                z = (logits[i] - top) * scale
                n = np.floor(max(z, np.float32(-126)) + np.float32(0.5))
                r = (max(z, np.float32(-126)) - n) * ln_2
                power_bits[i] = (np.int32(n) + np.int32(127)) << np.int32(23)
                weights[i] = small_power(r) if z >= np.float32(-126) else np.float32(0)
            for i in range(vocabulary):
                weights[i] *= powers[i]
            most = top_ks[row] if 0 < top_ks[row] < vocabulary else vocabulary
            if (most < vocabulary or top_ps[row] < 1) and top == top:
                # Rounding may lift the likeliest above 1, and so beyond the buckets.
                total = np.float64(0)
                for i in range(vocabulary):
                    weights[i] = min(weights[i], np.float32(1))
                if most < vocabulary:
                    value, equals, total = edge(
                        weights, bits, bucket_sums, bucket_counts, most, np.inf
                    )
                else:
                    for b in range(len(sums)):
                        part = np.float32(0)
                        for i in range(b * block, min(vocabulary, b * block + block)):
                            part += weights[i]
                        total += part
                if top_ps[row] < 1:
                    share = np.float64(top_ps[row]) * total
                    value, equals, total = edge(
                        weights, bits, bucket_sums, bucket_counts, most, share
                    )
                for i in range(vocabulary):
                    if weights[i] <= value:
                        if weights[i] < value or equals == 0:
                            weights[i] = 0
                        else:
                            equals -= 1
            if leasts[row] > 0:
                for i in range(vocabulary):
                    if weights[i] < leasts[row]:
                        weights[i] = 0
            total = np.float64(0)
            for b in range(len(sums)):
                part = np.float32(0)
                for i in range(b * block, min(vocabulary, b * block + block)):
                    part += weights[i]
                total += part
                sums[b] = total
            target = np.float64(draws[row]) * total
            # Find the first block, and in it the first token, whose sum exceeds the target. With
            # NaNs there is none; the last token is at least valid.
            b = 0
            while b < len(sums) - 1 and not sums[b] > target:
                b += 1
            reached = sums[b - 1] if b else np.float64(0)  # sum before the block
            picked = -1
            for i in range(b * block, min(vocabulary, b * block + block)):
                reached += weights[i]
                if weights[i] > 0:
                    picked = i
                    if reached > target:
                        break
            out[row] = picked if picked >= 0 else vocabulary - 1

    return draw
