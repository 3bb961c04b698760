# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
"""Paged attention in the ``triton`` language: one kernel for decodes and prompt chunks.

::

    a tile        some queries of one row of the step, with all heads that share a KV head:
                  token 0: head 0 … s-1 | token 1: head 0 … | …    s = query heads per KV head
    an item       one tile  x  some of its row's keys; a program computes an item for one KV head

    keys          ├─ item 7 ─┼─ item 8 ─┼ … ┤   then ``combine`` adds up a tile's items, its parts

The query heads that share a KV head are rows of one matrix, so that even a decode of one token is a
matrix product and each key is read once. The softmax over tiles is from Milakov and Gimelshein
2018, the split over keys from Dao et al. 2023 (flash-decoding). Items have about equal length for
any text lengths, as in FlashInfer's planner (Ye et al. 2025): one long text among short ones uses
many programs instead of delaying all. Importing this module needs ``triton``.
"""

import triton
import triton.language as tl


@triton.jit
def share_out(
    contexts,  # [rows] int32: keys of each row, at least 1
    items,  # [items, 4] int32, written: see ``attend``
    first_parts,  # [rows] int32, written: index of the row's first item
    part_counts,  # [rows] int32, written: how many items it has
    rows,
    item_count,
    aimed,  # items to aim at; there are ``rows`` more at most
    MIN_TILES: tl.constexpr,  # fewest tiles of keys in an item
    TILE_KEYS: tl.constexpr,
    ROWS: tl.constexpr,  # at least ``rows``
    BLOCK: tl.constexpr,  # items of a program
):
    """Divide the keys of a step's decodes into items of equal size, on the device."""
    row = tl.arange(0, ROWS)
    context = tl.load(contexts + row, mask=row < rows, other=0)
    tiles = (context + TILE_KEYS - 1) // TILE_KEYS
    size = tl.maximum((tl.sum(tiles, 0) + aimed - 1) // aimed, MIN_TILES)
    # Rounded: splitting a row that is barely longer than an item costs more than it saves.
    counts = tl.where(tiles > 0, tl.maximum((2 * tiles + size) // (2 * size), 1), 0)
    ends = tl.cumsum(counts, 0)
    if tl.program_id(0) == 0:
        tl.store(first_parts + row, ends - counts, mask=row < rows)
        tl.store(part_counts + row, counts, mask=row < rows)
    item = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    before = ends[None, :] <= item[:, None]  # rows with all items before it
    of_row = tl.sum(before.to(tl.int32), 1)
    first = tl.max(tl.where(before, ends[None, :], 0), 1)
    mine = row[None, :] == of_row[:, None]
    row_tiles = tl.sum(tl.where(mine, tiles[None, :], 0), 1)
    row_count = tl.sum(tl.where(mine, counts[None, :], 0), 1)
    each = (row_tiles + row_count - 1) // tl.maximum(row_count, 1)
    from_tile = (item - first) * each
    stored = item < item_count
    tl.store(items + item * 4, tl.where(row_count > 0, of_row, -1), mask=stored)
    tl.store(items + item * 4 + 1, from_tile, mask=stored)
    tl.store(items + item * 4 + 2, tl.minimum(from_tile + each, row_tiles), mask=stored)
    tl.store(items + item * 4 + 3, tl.where(row_count > 1, item, -1), mask=stored)


@triton.jit
def _add_keys(
    q,
    best,
    total,
    mixed,
    key_tile,
    places,  # of the KV head in the layer
    pages,  # of the row in the block table
    end,
    position,
    scale,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,  # whether a line may not see all keys of the tile
):
    """Add a tile of keys to each line's running results: its softmax's largest exponent, sum of
    weights, and weighted sum of values."""
    dims = tl.arange(0, PADDED_DIM)
    keys = key_tile * TILE_KEYS + tl.arange(0, TILE_KEYS)
    if MASKED:
        stored = keys < end
        page = tl.load(pages + keys // PAGE, mask=stored, other=0)
    else:
        page = tl.load(pages + keys // PAGE)
    SLOT: tl.constexpr = 2 * KV_HEADS * DIM
    at = places + page.to(tl.int64) * (PAGE * SLOT) + (keys % PAGE) * SLOT
    k_at, v_at = at[None, :] + dims[:, None], at[:, None] + KV_HEADS * DIM + dims[None, :]
    if MASKED:
        k = tl.load(k_at, mask=stored[None, :] & (dims < DIM)[:, None], other=0.0)
    elif DIM == PADDED_DIM:
        k = tl.load(k_at)
    else:
        k = tl.load(k_at, mask=(dims < DIM)[:, None], other=0.0)
    scores = tl.dot(q, k, input_precision=PRECISION)
    if MASKED:
        seen = keys[None, :] <= position[:, None]
        if WINDOW > 0:
            seen = seen & (keys[None, :] > position[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1) * scale)
    pivot = higher
    if MASKED:
        # A line that has seen no key yet keeps -inf; -inf minus -inf is NaN.
        pivot = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores * scale - pivot[:, None])
    fade = tl.exp2(best - pivot)
    total = total * fade + tl.sum(weights, 1)
    if MASKED:
        v = tl.load(v_at, mask=stored[:, None] & (dims < DIM)[None, :], other=0.0)
    elif DIM == PADDED_DIM:
        v = tl.load(v_at)
    else:
        v = tl.load(v_at, mask=(dims < DIM)[None, :], other=0.0)
    mixed = mixed * fade[:, None]
    mixed += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
    return higher, total, mixed


# An argument that differs between batches must not cause a compilation for each value.
@triton.jit(do_not_specialize=["table_stride"])
def attend(
    queries,  # [tokens, heads, head_dim]
    pool,  # one layer: [blocks, PAGE, 2 * KV_HEADS, head_dim], in one piece
    out,  # [tokens, heads, head_dim]
    shares,  # [items, KV_HEADS, LINES, head_dim] float32; touched only by items that are parts
    log_sums,  # [items, KV_HEADS, LINES] float32, base 2; likewise
    items,  # [items, 4] int32: tile, or -1: nothing to do | first and end of its tiles of keys |
    #         its index, or -1: it is all of its tile
    table,  # [rows, blocks of a row] int32
    tile_rows,  # [tiles] int32: which row a tile of queries belongs to
    tile_firsts,  # [tiles] int32: its first query, counted within the row
    row_tokens,  # [rows] int32: where the row's queries begin among the packed tokens
    row_queries,  # [rows] int32
    row_contexts,  # [rows] int32: keys of the row, those of its queries included
    scale,  # of the scores, times log2(e)
    query_token_stride,
    query_head_stride,
    table_stride,
    WINDOW: tl.constexpr,  # keys that a query sees, itself included; 0: all up to it
    SHARED: tl.constexpr,  # query heads per KV head
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    LINES: tl.constexpr,  # lines of a tile that can be in use
    PADDED_LINES: tl.constexpr,
    TILE_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute an item: softmax and weighted sum of values over its keys."""
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    tile = tl.load(items + item * 4)
    if tile < 0:
        return
    from_tile = tl.load(items + item * 4 + 1)
    to_tile = tl.load(items + item * 4 + 2)
    part = tl.load(items + item * 4 + 3)
    row = tl.load(tile_rows + tile)
    first = tl.load(tile_firsts + tile)
    count = tl.load(row_queries + row)
    context = tl.load(row_contexts + row)
    # 64 bits: a pool of many gigabytes has more elements than 32 count.
    token0 = tl.load(row_tokens + row).to(tl.int64)

    TILE_TOKENS: tl.constexpr = LINES // SHARED
    lines = tl.arange(0, PADDED_LINES)
    query = first + lines // SHARED
    head = kv_head * SHARED + lines % SHARED
    live = (lines < LINES) & (query < count)
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

    # Tiles of keys start at multiples of TILE_KEYS so that the order of the sums does not depend on
    # how a prompt was cut.
    earliest = context - count + first
    end = tl.minimum(context, earliest + TILE_TOKENS)
    seen_by_all = (earliest + 1) // TILE_KEYS
    if WINDOW > 0:
        seen_by_all = 0
        from_tile = tl.maximum(from_tile, tl.maximum(earliest - WINDOW + 1, 0) // TILE_KEYS)
    places = pool + kv_head * DIM
    pages = table + row * table_stride
    best = tl.full([PADDED_LINES], float("-inf"), tl.float32)
    total = tl.zeros([PADDED_LINES], tl.float32)
    mixed = tl.zeros([PADDED_LINES, PADDED_DIM], tl.float32)
    for masked in tl.static_range(1 if WINDOW > 0 else 0, 2):
        begin = tl.maximum(from_tile, seen_by_all) if masked else from_tile
        stop = to_tile if masked else tl.minimum(to_tile, seen_by_all)
        for key_tile in range(begin, stop):
            best, total, mixed = _add_keys(
                q,
                best,
                total,
                mixed,
                key_tile,
                places,
                pages,
                end,
                position,
                scale,
                WINDOW,
                KV_HEADS,
                DIM,
                PADDED_DIM,
                PAGE,
                TILE_KEYS,
                PRECISION,
                masked == 1,
            )

    divisor = tl.where(total > 0, total, 1.0)
    mixed = mixed / divisor[:, None]
    if part < 0:
        line = token * (KV_HEADS * SHARED) + head
        tl.store(
            out + line[:, None] * DIM + dims[None, :],
            mixed.to(out.dtype.element_ty),
            mask=live[:, None] & in_dim[None, :],
        )
    else:
        line = (part.to(tl.int64) * KV_HEADS + kv_head) * LINES + lines
        tl.store(
            shares + line[:, None] * DIM + dims[None, :],
            mixed,
            mask=live[:, None] & in_dim[None, :],
        )
        log_sum = tl.where(total > 0, best + tl.log2(divisor), float("-inf"))
        tl.store(log_sums + line, log_sum, mask=live)


@triton.jit(do_not_specialize=["group"])
def combine(
    shares,  # see ``attend``
    log_sums,
    out,
    first_parts,  # [tiles] int32: index of the tile's first item
    part_counts,  # [tiles] int32: how many it has; one alone has written its result itself
    tile_rows,
    tile_firsts,
    row_tokens,
    row_queries,
    group,  # lines of a program
    SHARED: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    LINES: tl.constexpr,
    PARTS: tl.constexpr,  # parts that it adds at once
):
    """Sum the parts of some lines of a tile, each weighted by the sum of its weights."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    first_line = tl.program_id(2) * group
    count = tl.load(part_counts + tile)
    if count <= 1:
        return
    first_part = tl.load(first_parts + tile).to(tl.int64)
    row = tl.load(tile_rows + tile)
    queries = tl.load(row_queries + row) - tl.load(tile_firsts + tile)
    lines = tl.minimum(tl.minimum(first_line + group, LINES), queries * SHARED)
    token0 = tl.load(row_tokens + row).to(tl.int64) + tl.load(tile_firsts + tile)
    dims = tl.arange(0, PADDED_DIM)
    in_dim = dims < DIM
    for own_line in range(first_line, lines):
        best = tl.full((), float("-inf"), tl.float32)
        total = tl.full((), 0.0, tl.float32)
        mixed = tl.zeros([PADDED_DIM], tl.float32)
        for begin in range(0, count, PARTS):
            part = begin + tl.arange(0, PARTS)
            line = ((first_part + part) * KV_HEADS + kv_head) * LINES + own_line
            there = part < count
            log_sum = tl.load(log_sums + line, mask=there, other=float("-inf"))
            higher = tl.maximum(best, tl.max(log_sum, 0))
            # In a layer with a window, parts before the window have seen no keys.
            pivot = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(log_sum - pivot)
            fade = tl.exp2(best - pivot)
            values = tl.load(
                shares + line[:, None] * DIM + dims[None, :],
                mask=there[:, None] & in_dim[None, :],
                other=0.0,
            )
            total = total * fade + tl.sum(weights, 0)
            mixed = mixed * fade + tl.sum(values * weights[:, None], 0)
            best = higher
        mixed = mixed / tl.where(total > 0, total, 1.0)
        line = (token0 + own_line // SHARED) * (KV_HEADS * SHARED)
        line += kv_head * SHARED + own_line % SHARED
        tl.store(out + line * DIM + dims, mixed.to(out.dtype.element_ty), mask=in_dim)
