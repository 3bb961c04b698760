"""The compiled loops of ``tiles``. To be imported only where numba is installed.

Their code is in the module's globals: numba's cache takes closures as constants, and these would be
new ones in every process.
"""

import math
from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from worker.cpu_kernels import tile_code
from worker.cpu_kernels.compiled import Function, compiled
from worker.cpu_kernels.native import (
    LANES,
    as_pointer,
    carray,
    float32,
    int64,
    largest,
    take,
    uint16,
)
from worker.cpu_kernels.team import DONE, FIRST_ARGUMENT, PARTS, TAKEN, Task, compiled_task
from worker.cpu_kernels.tile_code import (
    add_values,
    exponentials,
    prefetch,
    score_tile,
    transpose_keys,
)
from worker.cpu_kernels.tiles import AT, SPAN_TOKENS

_AHEAD: Final = 2
"""Tiles to prefetch before they are needed; µs per tile outside the caches, as measured: none 2.1,
one 1.4, two 1.2, four 1.5."""


@cache
def spans() -> Function:
    """A function (contexts, window) that cuts rows which have ``contexts`` [rows] int64 keys, of
    which they see the last ``window``, 0 for all: ``parts`` and ``merged``, see
    ``TileArguments``."""
    span = SPAN_TOKENS

    @compiled("Tuple((i8[:, ::1], i8[:, ::1]))(i8[::1], i8)", span)
    def spans(
        contexts: NDArray[np.int64], window: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        count, cut = 0, 0
        for keys in contexts:
            first = max(0, keys - window) if window else 0
            own = (keys + span - 1) // span - first // span
            count += own
            cut += own > 1
        parts = np.empty((count, 5), np.int64)
        merged = np.empty((cut, 3), np.int64)
        count, cut, partial = 0, 0, 0
        for row in range(len(contexts)):
            keys = contexts[row]
            begin = max(0, keys - window) if window else 0
            is_cut = (keys + span - 1) // span - begin // span > 1
            if is_cut:
                merged[cut, 0], merged[cut, 1] = row, partial
            while begin < keys:
                end = min(keys, (begin // span + 1) * span)
                parts[count, 0], parts[count, 1], parts[count, 2] = row, begin, end
                parts[count, 3] = partial if is_cut else -1
                parts[count, 4] = end == keys
                partial += is_cut
                count += 1
                begin = end
            if is_cut:
                merged[cut, 2] = partial
                cut += 1
        return parts, merged

    return spans


@cache
def attend(heads: int, kv_heads: int, dim: int, block_tokens: int, is_bfloat16: bool) -> Task:
    """Compile attention of a job laid out as ``Arguments``: results [rows, heads, dim], in the
    pool's type, go to its ``out``, those of cut rows to ``partial``."""
    shared = heads // kv_heads
    scale = np.float32(1 / math.sqrt(dim))
    item = 2 if is_bfloat16 else 4
    head_bytes = dim * item
    token_values = 2 * kv_heads * dim
    span, row_bytes = SPAN_TOKENS, 4 * SPAN_TOKENS
    half_bytes, tile_bytes, ahead = kv_heads * head_bytes, 8 * LANES, _AHEAD
    stored = uint16 if is_bfloat16 else float32
    size = FIRST_ARGUMENT + len(AT)

    @compiled_task(heads, kv_heads, dim, block_tokens, is_bfloat16, _AHEAD, AT, *tile_code.SOURCES)
    def attend(pointer: Any) -> None:
        job = carray(pointer, (size,), int64)
        query_stride, new_stride, table_stride = (
            job[AT.query_stride],
            job[AT.new_stride],
            job[AT.table_stride],
        )
        parts = carray(as_pointer(job[AT.parts], int64), (job[PARTS], 5), int64)
        transposed = np.empty(dim * LANES, np.float32)
        scores = np.empty((heads, span), np.float32)
        query = np.empty(heads * dim, np.float32)
        bits = query.view(np.uint32)
        totals = np.empty(heads * dim, np.float32)
        total_bits = totals.view(np.uint32)
        keys = np.empty(span, np.int64)
        while True:
            part = take(job[AT.job] + 8 * TAKEN)
            if part >= job[PARTS]:
                break
            row, begin, end, partial = (
                parts[part, 0],
                parts[part, 1],
                parts[part, 2],
                parts[part, 3],
            )
            if parts[part, 4]:
                slot = carray(as_pointer(job[AT.slots] + 8 * row, int64), (1,), int64)[0]
                new = carray(
                    as_pointer(job[AT.new] + row * new_stride * item, stored),
                    (token_values,),
                    stored,
                )
                place = carray(
                    as_pointer(job[AT.pages] + slot * token_values * item, stored),
                    (token_values,),
                    stored,
                )
                for i in range(token_values):
                    place[i] = new[i]
            given = carray(
                as_pointer(job[AT.queries] + row * query_stride * item, stored),
                (heads * dim,),
                stored,
            )
            for i in range(heads * dim):
                if is_bfloat16:
                    bits[i] = np.uint32(given[i]) << np.uint32(16)
                else:
                    query[i] = given[i]
            for i in range(heads * dim):
                query[i] *= scale
                totals[i] = 0
            blocks = carray(
                as_pointer(job[AT.table] + row * table_stride * 8, int64), (table_stride,), int64
            )
            count = end - begin
            tiles = (count + LANES - 1) // LANES
            for i in range(tiles * LANES):
                # Behind the end the last key again: what else lies there may be anything.
                key = min(begin + i, end - 1)
                slot = blocks[key // block_tokens] * block_tokens + key % block_tokens
                keys[i] = job[AT.pages] + slot * token_values * item
            keys_at = keys.ctypes.data
            for tile in range(min(ahead, tiles)):
                prefetch(keys_at + tile * tile_bytes, 0, half_bytes)
            for tile in range(tiles):
                coming = tile + ahead
                if coming < tiles:
                    prefetch(keys_at + coming * tile_bytes, 0, half_bytes)
                elif coming < 2 * tiles:
                    prefetch(keys_at + (coming - tiles) * tile_bytes, half_bytes, half_bytes)
                for group in range(kv_heads):
                    transpose_keys(
                        keys_at + tile * tile_bytes,
                        group * head_bytes,
                        transposed.ctypes.data,
                        dim,
                        is_bfloat16,
                    )
                    score_tile(
                        query.ctypes.data + group * shared * dim * 4,
                        transposed.ctypes.data,
                        scores.ctypes.data + group * shared * row_bytes + tile * LANES * 4,
                        row_bytes,
                        shared,
                        dim,
                    )
            for head in range(heads):
                at = scores.ctypes.data + head * row_bytes
                top = largest(at, tiles)
                exponentials(at, tiles, top)
                for i in range(count, tiles * LANES):
                    scores[head, i] = 0
                weight = np.float32(0)
                for i in range(tiles * LANES):
                    weight += scores[head, i]
                if partial < 0:
                    share = np.float32(1) / weight
                    for i in range(tiles * LANES):
                        scores[head, i] *= share
                else:
                    here = job[AT.partial] + (partial * heads + head) * (dim + 2) * 4
                    told = carray(as_pointer(here, float32), (dim + 2,), float32)
                    told[dim] = top
                    told[dim + 1] = weight
            for tile in range(tiles):
                if tile + ahead < tiles:
                    prefetch(keys_at + (tile + ahead) * tile_bytes, half_bytes, half_bytes)
                for group in range(kv_heads):
                    add_values(
                        scores.ctypes.data + group * shared * row_bytes + tile * LANES * 4,
                        row_bytes,
                        keys_at + tile * tile_bytes,
                        half_bytes + group * head_bytes,
                        totals.ctypes.data + group * shared * dim * 4,
                        shared,
                        dim,
                        is_bfloat16,
                    )
            if partial < 0:
                out = carray(
                    as_pointer(job[AT.out] + row * heads * dim * item, stored),
                    (heads * dim,),
                    stored,
                )
                for i in range(heads * dim):
                    if is_bfloat16:
                        out[i] = (
                            total_bits[i]
                            + np.uint32(0x7FFF)
                            + ((total_bits[i] >> np.uint32(16)) & np.uint32(1))
                        ) >> np.uint32(16)
                    else:
                        out[i] = totals[i]
            else:
                for head in range(heads):
                    here = job[AT.partial] + (partial * heads + head) * (dim + 2) * 4
                    told = carray(as_pointer(here, float32), (dim,), float32)
                    for d in range(dim):
                        told[d] = totals[head * dim + d]
            take(job[AT.job] + 8 * DONE)

    return attend


@cache
def merge(heads: int, dim: int, is_bfloat16: bool) -> Task:
    """Compile the merging of a job's ``partial`` results into those of the rows that were cut."""
    stored = uint16 if is_bfloat16 else float32
    item = 2 if is_bfloat16 else 4
    size, width = FIRST_ARGUMENT + len(AT), dim + 2

    @compiled_task(heads, dim, is_bfloat16, AT, *tile_code.SOURCES)
    def merge(pointer: Any) -> None:
        job = carray(pointer, (size,), int64)
        rows = carray(as_pointer(job[AT.merged], int64), (job[AT.merged_rows], 3), int64)
        total = np.empty(dim, np.float32)
        bits = total.view(np.uint32)
        for i in range(job[AT.merged_rows]):
            row, begin, end = rows[i, 0], rows[i, 1], rows[i, 2]
            partial = carray(as_pointer(job[AT.partial], float32), (end, heads, width), float32)
            at = job[AT.out] + row * heads * dim * item
            out = carray(as_pointer(at, stored), (heads, dim), stored)
            for head in range(heads):
                top = np.float32(-np.inf)
                for k in range(begin, end):
                    top = max(top, partial[k, head, dim])
                weight = np.float32(0)
                for d in range(dim):
                    total[d] = 0
                for k in range(begin, end):
                    share = np.exp(partial[k, head, dim] - top)
                    weight += share * partial[k, head, dim + 1]
                    for d in range(dim):
                        total[d] += share * partial[k, head, d]
                for d in range(dim):
                    total[d] /= weight
                for d in range(dim):
                    if is_bfloat16:
                        half = np.uint32(0x7FFF) + ((bits[d] >> np.uint32(16)) & np.uint32(1))
                        out[head, d] = (bits[d] + half) >> np.uint32(16)
                    else:
                        out[head, d] = total[d]
        job[DONE] = job[PARTS]

    return merge
