# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Paged attention in the ``triton`` language: one kernel for decodes and chunks of prompts.

::

    a program     one tile of queries  x  one KV head  x  one share (split) of the keys
    its rows      token 0: head 0 … s-1 | token 1: head 0 … | …    s = query heads per KV head

    keys          ├──── split 0 ────┼──── split 1 ────┼ … ┤   then ``combine`` adds the shares up

The query heads that share a KV head are rows of one matrix, so that a decode of one token too is a
matrix product and each key is read once. A softmax over tiles: Milakov and Gimelshein 2018; the
split over keys: Dao et al. 2023 (flash-decoding). Importing this module needs ``triton``.
"""

import triton
import triton.language as tl


# An argument that differs between batches must not cost a compilation for each value.
@triton.jit(do_not_specialize=["table_stride"])
def attend(
    queries,  # [tokens, heads, head_dim]
    pool,  # one layer: [blocks, PAGE, 2 * KV_HEADS, head_dim]
    out,  # [tokens, heads, head_dim], or with SPLITS > 1 [tokens, heads, SPLITS, head_dim] float32
    log_sums,  # [tokens, heads, SPLITS] float32, base 2; not touched with SPLITS == 1
    table,  # [rows, blocks of a row] int32
    tile_rows,  # [tiles] int32: which row a tile of queries belongs to
    tile_firsts,  # [tiles] int32: its first query, counted within the row
    row_tokens,  # [rows] int32: where the row's queries begin among the packed tokens
    row_queries,  # [rows] int32
    row_contexts,  # [rows] int32: keys of the row, those of its queries included
    scale,  # of the scores, times log2(e)
    query_token_stride,
    query_head_stride,
    page_stride,
    slot_stride,
    head_stride,
    table_stride,
    WINDOW: tl.constexpr,  # keys that a query sees, itself included; 0: all up to it
    SHARED: tl.constexpr,  # query heads per KV head
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    row = tl.load(tile_rows + tile)
    first = tl.load(tile_firsts + tile)
    count = tl.load(row_queries + row)
    context = tl.load(row_contexts + row)
    # 64 bits: a pool of many gigabytes has more elements than 32 count.
    token0 = tl.load(row_tokens + row).to(tl.int64)

    TILE_TOKENS: tl.constexpr = TILE_ROWS // SHARED
    lines = tl.arange(0, TILE_ROWS)
    query = first + lines // SHARED
    head = kv_head * SHARED + lines % SHARED
    live = (lines < TILE_TOKENS * SHARED) & (query < count)
    position = context - count + query
    dims = tl.arange(0, PADDED_DIM)
    in_dim = dims < DIM
    token = token0 + query
    q = tl.load(
        queries
        + token[:, None] * query_token_stride
        + head[:, None] * query_head_stride
        + dims[None, :],
        mask=live[:, None] & in_dim[None, :],
        other=0.0,
    )

    # Tiles of keys start at multiples of TILE_KEYS whatever the row's share of the step is, so
    # that the order of the sums does not depend on how a prompt was cut.
    earliest = context - count + first
    end = tl.minimum(context, earliest + TILE_TOKENS)
    first_tile = 0
    if WINDOW > 0:
        first_tile = tl.maximum(earliest - WINDOW + 1, 0) // TILE_KEYS
    last_tile = tl.cdiv(end, TILE_KEYS)
    share = tl.cdiv(last_tile - first_tile, SPLITS)
    from_tile = first_tile + split * share
    to_tile = tl.minimum(from_tile + share, last_tile)

    best = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    mixed = tl.zeros([TILE_ROWS, PADDED_DIM], tl.float32)
    for key_tile in range(from_tile, to_tile):
        keys = key_tile * TILE_KEYS + tl.arange(0, TILE_KEYS)
        stored = keys < end
        page = tl.load(table + row * table_stride + keys // PAGE, mask=stored, other=0)
        slot = page.to(tl.int64) * page_stride + (keys % PAGE) * slot_stride
        places = pool + slot + kv_head * head_stride
        k = tl.load(
            places[None, :] + dims[:, None], mask=stored[None, :] & in_dim[:, None], other=0.0
        )
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        seen = keys[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (keys[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))
        # A line that has seen no key yet keeps -inf; subtracting that from itself is no number.
        pivot = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - pivot[:, None])
        fade = tl.exp2(best - pivot)
        total = total * fade + tl.sum(weights, 1)
        v = tl.load(
            places[:, None] + KV_HEADS * head_stride + dims[None, :],
            mask=stored[:, None] & in_dim[None, :],
            other=0.0,
        )
        mixed = mixed * fade[:, None]
        mixed += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        best = higher

    divisor = tl.where(total > 0, total, 1.0)
    mixed = mixed / divisor[:, None]
    line = token * (KV_HEADS * SHARED) + head
    if SPLITS == 1:
        tl.store(
            out + line[:, None] * DIM + dims[None, :],
            mixed.to(out.dtype.element_ty),
            mask=live[:, None] & in_dim[None, :],
        )
    else:
        share_of = line * SPLITS + split
        tl.store(
            out + share_of[:, None] * DIM + dims[None, :],
            mixed,
            mask=live[:, None] & in_dim[None, :],
        )
        log_sum = tl.where(total > 0, best + tl.log2(divisor), float("-inf"))
        tl.store(log_sums + share_of, log_sum, mask=live)


@triton.jit
def combine(
    shares,  # [lines, SPLITS, head_dim] float32
    log_sums,  # [lines, SPLITS] float32, base 2; at least one of a line is finite
    out,  # [lines, head_dim]
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    dims = tl.arange(0, PADDED_DIM)
    splits = tl.arange(0, SPLITS)
    log_sum = tl.load(log_sums + line * SPLITS + splits)
    weights = tl.exp2(log_sum - tl.max(log_sum, 0))
    places = shares + (line * SPLITS + splits[:, None]) * DIM + dims[None, :]
    values = tl.load(places, mask=(dims < DIM)[None, :], other=0.0)
    mixed = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
    tl.store(out + line * DIM + dims, mixed.to(out.dtype.element_ty), mask=dims < DIM)
