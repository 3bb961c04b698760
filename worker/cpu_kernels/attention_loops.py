"""Attention of decodes on the CPU. Each *span* of a row's keys is one part of a job.

::

    row 0   keys 0 … 255 | 256 … 300       parts 0, 1: their results are merged
    row 1   keys 0 … 63                    part 2
    row 2   keys 0 … 255 | 256 … 511 | …   parts 3, 4, …: spread over the threads

A span is read page by page with a running softmax (Milakov and Gimelshein 2018); spans are merged
as in Flash-Decoding (Dao et al. 2023). A row's cuts depend only on its own length. Import this
module only if numba is installed.
"""

import math
from functools import cache
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from worker.cpu_kernels import native
from worker.cpu_kernels.compiled import Function, compiled
from worker.cpu_kernels.native import (
    array_at,
    carray,
    float32,
    int64,
    parts_of,
    prefetch,
    small_power,
    store,
    uint16,
)
from worker.cpu_kernels.team import FIRST_ARGUMENT, PARTS, TeamTask, compiled_task

SPAN_TOKENS: Final = 256


class AttentionArguments(NamedTuple):
    """The fields of a job after its counters: addresses, and strides in elements."""

    queries: int
    query_stride: int
    new: int
    new_stride: int
    pages: int
    out: int
    slots: int
    """[rows]: the pool's slot for each row's new keys and values."""
    table: int
    table_stride: int
    parts: int
    """[parts, 5]: row, first key, end, its partial result or -1, whether the row ends there."""
    partial: int
    """[partial results, heads, dim + 2] float32: weighted sum, largest score, sum of weights."""
    merged: int
    """[merged rows, 3]: row, its first partial result, their end. Each is a part of the merge
    job."""
    chunks: int
    """[chunks, 5]: row, its first token in the step, its tokens, its keys including those, and the
    offset of its tiles in ``packed``, in bytes."""
    packed: int
    """Keys and values of chunks, see ``prompt_loops``."""
    window: int
    """Number of keys that a query sees, including its own; 0: all."""


AT: Final = AttentionArguments(
    *range(FIRST_ARGUMENT, FIRST_ARGUMENT + len(AttentionArguments._fields))
)
"""Index of each of the ``AttentionArguments`` in a job."""


@cache
def spans() -> Function:
    """Compile a function (contexts, window) that cuts rows with ``contexts`` [rows] int64 keys, of
    which they see the last ``window`` (0: all). It returns ``parts`` and ``merged``, see
    ``AttentionArguments``."""
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
def attend(heads: int, kv_heads: int, dim: int, block_tokens: int, is_bfloat16: bool) -> TeamTask:
    """Compile a job's attention: results [rows, heads, dim], in the pool's dtype, go to ``out``,
    those of cut rows to ``partial``. The shape is fixed so that the loops become vector code.

    Exponentials of x ≤ 0 are computed a page at a time, which libm cannot do: e^x = 2^n · 2^r with
    integer n and r within ½ of 0. The bits of 2^n are n + 127 as a float's exponent.
    """
    shared = heads // kv_heads
    scale = np.float32(1 / math.sqrt(dim))
    log2_e, ln_2 = np.float32(1 / math.log(2)), np.float32(math.log(2))
    item = 2 if is_bfloat16 else 4
    values = 2 * kv_heads * dim  # values per token
    stored = uint16 if is_bfloat16 else float32
    size = FIRST_ARGUMENT + len(AT)

    @compiled_task(heads, kv_heads, dim, block_tokens, is_bfloat16, AT, native.SOURCE)
    def attend(pointer: Any) -> None:
        job = carray(pointer, (size,), int64)
        parts = array_at(job[AT.parts], int64, (job[PARTS], 5))
        scores = np.zeros((heads, block_tokens), np.float32)
        flat = scores.ravel()
        powers = np.empty(heads * block_tokens, np.float32)
        power_bits = powers.view(np.int32)
        query = np.empty((heads, dim), np.float32)
        query_bits = query.view(np.uint32)
        total = np.empty((heads, dim), np.float32)
        highest = np.empty(heads, np.float32)
        weight = np.empty(heads, np.float32)
        wide = np.empty((2 * kv_heads, block_tokens, dim), np.float32)
        wide_bits = wide.view(np.uint32)
        for part in parts_of(job):
            row, first_key, keys, partial, is_last = parts[part]
            if is_last:
                slot = array_at(job[AT.slots] + 8 * row, int64, 1)[0]
                at = job[AT.new] + row * job[AT.new_stride] * item
                new = array_at(at, stored, values)
                at = job[AT.pages] + slot * values * item
                place = array_at(at, stored, values)
                for i in range(values):
                    place[i] = new[i]
            at = job[AT.queries] + row * job[AT.query_stride] * item
            given = array_at(at, stored, (heads, dim))
            for head in range(heads):
                highest[head] = -np.inf
                weight[head] = 0
                for d in range(dim):
                    total[head, d] = 0
                    if is_bfloat16:
                        query_bits[head, d] = np.uint32(given[head, d]) << np.uint32(16)
                    else:
                        query[head, d] = given[head, d]
                for d in range(dim):
                    query[head, d] *= scale
            stride = job[AT.table_stride]
            at = job[AT.table] + row * stride * 8
            table = array_at(at, int64, stride)
            for block in range(
                first_key // block_tokens, (keys + block_tokens - 1) // block_tokens
            ):
                at = job[AT.pages] + table[block] * block_tokens * values * item
                page = array_at(at, stored, (block_tokens, 2 * kv_heads, dim))
                last_block = (keys - 1) // block_tokens
                ahead = (
                    job[AT.pages] + table[min(block + 1, last_block)] * block_tokens * values * item
                )
                begin = max(0, first_key - block * block_tokens)
                end = min(block_tokens, keys - block * block_tokens)
                if is_bfloat16:
                    for t in range(begin, end):
                        for head in range(2 * kv_heads):
                            for d in range(dim):
                                bits = np.uint32(page[t, head, d]) << np.uint32(16)
                                wide_bits[head, t, d] = bits
                for t in range(begin, end):
                    for line in range(values * item // 64):
                        prefetch(ahead + (t * values * item) + 64 * line)
                    for head in range(heads):
                        key = wide[head // shared, t] if is_bfloat16 else page[t, head // shared]
                        score = np.float32(0)
                        for d in range(dim):
                            score += query[head, d] * key[d]
                        scores[head, t] = score
                for head in range(heads):
                    top = highest[head]
                    for t in range(begin, end):
                        top = max(top, scores[head, t])
                    if top > highest[head]:
                        shrink = np.exp(highest[head] - top)
                        highest[head] = top
                        weight[head] *= shrink
                        for d in range(dim):
                            total[head, d] *= shrink
                    for t in range(begin, end):
                        scores[head, t] -= top
                for i in range(len(flat)):
                    z = max(flat[i] * log2_e, np.float32(-126))
                    n = np.floor(z + np.float32(0.5))
                    r = (z - n) * ln_2
                    power_bits[i] = (np.int32(n) + np.int32(127)) << np.int32(23)
                    flat[i] = small_power(r)
                for i in range(len(flat)):
                    flat[i] *= powers[i]
                for head in range(heads):
                    for t in range(begin, end):
                        weight[head] += scores[head, t]
                for head in range(heads):
                    at = kv_heads + head // shared
                    for t in range(begin, end):
                        share = scores[head, t]
                        value = wide[at, t] if is_bfloat16 else page[t, at]
                        for d in range(dim):
                            total[head, d] += share * value[d]
            if partial < 0:
                for head in range(heads):
                    for d in range(dim):
                        total[head, d] /= weight[head]
                    at = (row * heads + head) * dim
                    store(total[head], job[AT.out], is_bfloat16, at)
            else:
                at = job[AT.partial] + partial * heads * (dim + 2) * 4
                told = array_at(at, float32, (heads, dim + 2))
                for head in range(heads):
                    for d in range(dim):
                        told[head, d] = total[head, d]
                    told[head, dim] = highest[head]
                    told[head, dim + 1] = weight[head]

    return attend


@cache
def merge(heads: int, dim: int, is_bfloat16: bool) -> TeamTask:
    """Compile the merge of ``partial`` results into the results of cut rows, one part per row."""
    size, width = FIRST_ARGUMENT + len(AT), dim + 2

    @compiled_task(heads, dim, is_bfloat16, AT, native.SOURCE)
    def merge(pointer: Any) -> None:
        job = carray(pointer, (size,), int64)
        rows = array_at(job[AT.merged], int64, (job[PARTS], 3))
        total = np.empty(dim, np.float32)
        for part in parts_of(job):
            row, begin, end = rows[part, 0], rows[part, 1], rows[part, 2]
            partial = array_at(job[AT.partial], float32, (end, heads, width))
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
                at = (row * heads + head) * dim
                store(total, job[AT.out], is_bfloat16, at)

    return merge
