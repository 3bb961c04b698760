"""Attention of prompt chunks, with the inner loop of the block products.

A chunk's keys and values are first packed in that loop's weight layout, ``TILE_KEYS`` at a time::

    packed  [tiles][kv_heads][keys | values]
    keys    [TILE_KEYS / 32][dim / unit][32 keys][unit]          unit: 2 for bfloat16, 1 for float32
    values  [dims / 32][TILE_KEYS / unit][32 dims][unit]         dims: dim, padded to whole blocks

Then each part of a second job, some tokens of one head, reads the tiles that it sees with a running
softmax (Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022): tiles hidden by the causal
mask are not computed, and no scores go to memory. Shares are rounded to the pool's dtype before
they weight the values, as in torch's attention. Import this module only if numba is installed.
"""

import math
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from worker.cpu_kernels import block_code
from worker.cpu_kernels.attention_loops import AT
from worker.cpu_kernels.block_code import (
    BLOCK_OUTPUTS,
    CACHE_LINE,
    MAX_ROWS,
    TURN_BYTES,
    add_scaled,
    aligned,
    block_sums,
    shares_of,
    top_of,
)
from worker.cpu_kernels.block_job import Form
from worker.cpu_kernels.native import (
    array_at,
    carray,
    float32,
    int64,
    parts_of,
    store,
    uint16,
    uint32,
)
from worker.cpu_kernels.team import FIRST_ARGUMENT, PARTS, TeamTask, compiled_task

TILE_KEYS: Final = 128
"""Keys per tile: with 64 dimensions in bfloat16, its 32 KiB of keys and values stay in the L1 cache
while all groups of a part's rows read them."""
PART_TOKENS: Final = 48
"""Maximum tokens per part, which read a tile in groups of as many rows as fit in registers."""
_SOURCE: Final = Path(__file__).read_bytes()
Rows = NDArray[np.int64]


def tile_bytes(kv_heads: int, dim: int, item: int) -> int:
    """Bytes of a tile's keys and values, with ``item`` bytes per number."""
    return kv_heads * TILE_KEYS * (dim + _padded(dim)) * item


def _padded(dim: int) -> int:
    return -(-dim // BLOCK_OUTPUTS) * BLOCK_OUTPUTS


def cut(
    query_tokens: NDArray[np.int64],
    context_tokens: NDArray[np.int64],
    rows: range,
    window: int,
    heads: int,
    bytes_of_tile: int,
) -> tuple[Rows, Rows, Rows]:
    """Returns the chunks of a batch, as in ``AttentionArguments``; the parts that pack them: chunk,
    tile; and the parts that attend: chunk, head, first token, end.

    ``query_tokens`` and ``context_tokens`` [rows]: tokens that rows compute, and have afterwards;
    ``rows`` are the chunks' rows. ``window``: number of keys that a query sees, 0: all.
    """
    chunks, tiles, parts = list[tuple[int, ...]](), list[Rows](), list[Rows]()
    first_token, count = int(query_tokens[: rows.start].sum()), 0
    for at, row in enumerate(rows):
        tokens, keys = int(query_tokens[row]), int(context_tokens[row])
        first = max(0, keys - tokens - window + 1) // TILE_KEYS if window else 0
        own = np.arange(first, -(-keys // TILE_KEYS))
        chunks.append((row, first_token, tokens, keys, (count - first) * bytes_of_tile))
        tiles.append(_rows(at, own))
        begins = np.arange(0, tokens, PART_TOKENS)[:, None]
        parts.append(_rows(at, np.arange(heads), begins, np.minimum(begins + PART_TOKENS, tokens)))
        first_token += tokens
        count += len(own)
    made = np.array(chunks)
    cut = np.concatenate(parts)
    before = (made[:, 3] - made[:, 2])[cut[:, 0]]
    longest_first = np.argsort(-(before + cut[:, 3]), kind="stable")
    return made, np.concatenate(tiles), cut[longest_first]


def _rows(*columns: NDArray[np.int64] | int) -> Rows:
    """Rows of ``columns``, which are broadcast to each other."""
    rows: Rows = np.stack(np.broadcast_arrays(*columns), axis=-1)
    return rows.reshape(-1, len(columns))


@cache
def pack(kv_heads: int, dim: int, block_tokens: int, is_bfloat16: bool) -> TeamTask:
    """Compile the first job: each part stores a tile's new keys and values in the pool and packs
    the tile."""
    item, unit = (2, 2) if is_bfloat16 else (4, 1)
    stored = uint16 if is_bfloat16 else float32
    values, padded = 2 * kv_heads * dim, _padded(dim)
    words = dim // unit
    key_bytes, bytes_of_tile = TILE_KEYS * dim * item, tile_bytes(kv_heads, dim, item)
    size = FIRST_ARGUMENT + len(AT)

    @compiled_task(kv_heads, dim, block_tokens, is_bfloat16, AT, _SOURCE, *block_code.SOURCES)
    def pack(pointer: Any) -> None:
        job = carray(pointer, (size,), int64)
        parts = array_at(job[AT.parts], int64, (job[PARTS], 2))
        zeros = np.zeros(values, np.float32)
        where = np.empty(TILE_KEYS, np.int64)
        for part in parts_of(job):
            tile = parts[part, 1]
            at = parts[part, 0]
            chunks, stride = array_at(job[AT.chunks], int64, (at + 1, 5)), job[AT.table_stride]
            row, first_token, tokens, keys, packed = chunks[at]
            table = array_at(job[AT.table] + 8 * row * stride, int64, stride)
            for t in range(TILE_KEYS):
                key = tile * TILE_KEYS + t
                if key >= keys:
                    where[t] = zeros.ctypes.data
                    continue
                slot = table[key // block_tokens] * block_tokens + key % block_tokens
                where[t] = job[AT.pages] + slot * values * item
                token = key - (keys - tokens)
                if token >= 0:
                    at = job[AT.new] + (first_token + token) * job[AT.new_stride] * item
                    new = array_at(at, stored, values)
                    place = array_at(where[t], stored, values)
                    for i in range(values):
                        place[i] = new[i]
            at = job[AT.packed] + packed + tile * bytes_of_tile
            for head in range(kv_heads):
                for t in range(TILE_KEYS):
                    block = at + t // BLOCK_OUTPUTS * words * TURN_BYTES
                    lines = array_at(block, uint32, (words, BLOCK_OUTPUTS))
                    given = where[t] + head * dim * item
                    key_words = array_at(given, uint32, words)
                    for word in range(words):
                        lines[word, t % BLOCK_OUTPUTS] = key_words[word]
                at += key_bytes
                for d in range(0, padded, BLOCK_OUTPUTS):
                    some = min(BLOCK_OUTPUTS, dim - d)
                    for t in range(0, TILE_KEYS, unit):
                        line = array_at(at, uint32, BLOCK_OUTPUTS)
                        offset = ((kv_heads + head) * dim + d) * item
                        if is_bfloat16:
                            low = array_at(where[t] + offset, uint16, some)
                            high = array_at(where[t + 1] + offset, uint16, some)
                            for i in range(some):
                                line[i] = np.uint32(low[i]) | np.uint32(high[i]) << np.uint32(16)
                        else:
                            exact = array_at(where[t] + offset, uint32, some)
                            for i in range(some):
                                line[i] = exact[i]
                        for i in range(some, BLOCK_OUTPUTS):
                            line[i] = 0
                        at += TURN_BYTES

    return pack


@cache
def attend(heads: int, kv_heads: int, dim: int, is_bfloat16: bool) -> TeamTask:
    """Compile the second job: each part sets ``out`` [tokens, heads, dim], in the pool's dtype, for
    some tokens of a head."""
    item, unit = (2, 2) if is_bfloat16 else (4, 1)
    form = int(Form.DOTS if is_bfloat16 else Form.FLOAT32)
    shared, padded = heads // kv_heads, _padded(dim)
    key_bytes, bytes_of_tile = TILE_KEYS * dim * item, tile_bytes(kv_heads, dim, item)
    head_bytes = bytes_of_tile // kv_heads
    turns, blocks, block_turns = dim // unit, TILE_KEYS // BLOCK_OUTPUTS, BLOCK_OUTPUTS // unit
    scale = np.float32(1 / math.sqrt(dim))
    infinity = np.float32(np.inf)
    sum_bytes, share_bytes = 4 * BLOCK_OUTPUTS, TILE_KEYS * item
    score_bytes = MAX_ROWS * sum_bytes
    room_bytes = (blocks + 1) * score_bytes + MAX_ROWS * share_bytes
    size = FIRST_ARGUMENT + len(AT)

    @compiled_task(heads, kv_heads, dim, is_bfloat16, AT, _SOURCE, *block_code.SOURCES)
    def attend(pointer: Any) -> None:
        job = carray(pointer, (size,), int64)
        parts = array_at(job[AT.parts], int64, (job[PARTS], 4))
        room = np.empty(room_bytes + CACHE_LINE, np.uint8)
        total = np.empty((PART_TOKENS, padded), np.float32)
        top = np.empty(PART_TOKENS, np.float32)
        weight = np.empty(PART_TOKENS, np.float32)
        shrink = np.empty(MAX_ROWS, np.float32)
        window, stride = job[AT.window], job[AT.query_stride] * item
        for part in parts_of(job):
            # Used here, because numba frees an array after its last use.
            scores_at = aligned(room)
            sums_at = scores_at + blocks * score_bytes
            shares_at = sums_at + score_bytes
            scores = array_at(scores_at, float32, (blocks, MAX_ROWS, BLOCK_OUTPUTS))
            at = parts[part, 0]
            _, first_token, tokens, keys, packed = array_at(job[AT.chunks], int64, (at + 1, 5))[at]
            head, begin, end = parts[part, 1], parts[part, 2], parts[part, 3]
            before = keys - tokens  # keys of earlier steps
            queries = job[AT.queries] + (first_token + begin) * stride + head * dim * item
            for i in range(end - begin):
                top[i] = -infinity
                weight[i] = 0
                for d in range(padded):
                    total[i, d] = 0
            first_tile = max(0, before + begin - window + 1) // TILE_KEYS if window else 0
            for tile in range(first_tile, (before + end - 1) // TILE_KEYS + 1):
                keys_at = job[AT.packed] + packed + tile * bytes_of_tile
                keys_at += head // shared * head_bytes
                values_at = keys_at + key_bytes
                for first in range(0, end - begin, MAX_ROWS):
                    count = min(MAX_ROWS, end - begin - first)
                    # The first row sees the tile's keys before ``seen``; each further row sees one
                    # more.
                    seen = before + begin + first + 1 - tile * TILE_KEYS
                    last_block = min(blocks, (seen + count + BLOCK_OUTPUTS - 2) // BLOCK_OUTPUTS)
                    first_block = max(0, seen - window) // BLOCK_OUTPUTS if window else 0
                    if last_block <= first_block:
                        continue
                    some = last_block - first_block
                    for block in range(first_block, last_block):
                        block_sums(
                            queries + first * stride,
                            stride,
                            count,
                            keys_at + block * turns * TURN_BYTES,
                            turns,
                            values_at,
                            0,
                            scores_at + block * score_bytes,
                            False,
                            form,
                        )
                    for i in range(count):
                        limit, hidden = seen + i, seen + i - window if window else 0
                        for block in range(first_block, last_block):
                            key = block * BLOCK_OUTPUTS
                            for k in range(max(0, limit - key), BLOCK_OUTPUTS):
                                scores[block, i, k] = -infinity
                            for k in range(min(BLOCK_OUTPUTS, hidden - key)):
                                scores[block, i, k] = -infinity
                        known = top[first + i]
                        line = scores_at + first_block * score_bytes + i * sum_bytes
                        highest = top_of(line, score_bytes, some, known)
                        top[first + i] = highest
                        # A row that has seen no key yet keeps nothing of this tile either.
                        shrink[i] = np.exp((known - highest) * scale) if highest > known else 1
                        if highest == -infinity:
                            highest = np.float32(0)
                        at = shares_at + i * share_bytes
                        added = shares_of(line, score_bytes, some, highest, scale, at, form)
                        weight[first + i] = weight[first + i] * shrink[i] + added
                    for d in range(0, padded, BLOCK_OUTPUTS):
                        block_at = values_at + d // BLOCK_OUTPUTS * (TILE_KEYS // unit) * TURN_BYTES
                        block_sums(
                            shares_at,
                            share_bytes,
                            count,
                            block_at + first_block * block_turns * TURN_BYTES,
                            some * block_turns,
                            values_at,
                            0,
                            sums_at,
                            False,
                            form,
                        )
                        for i in range(count):
                            at = total.ctypes.data + 4 * ((first + i) * padded + d)
                            add_scaled(at, shrink[i], sums_at + i * sum_bytes)
            for i in range(end - begin):
                at = ((first_token + begin + i) * heads + head) * dim
                for d in range(dim):
                    total[i, d] /= weight[i]
                store(total[i][:dim], job[AT.out], is_bfloat16, at)

    return attend
