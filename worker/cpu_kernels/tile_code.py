"""The inner loops of attention on the CPU: *tiles* of 16 keys, as vector code.

::

    tile of keys      16 addresses, one per key: where its heads lie in the pool
    transposed        [dim, 16] float32: lanes are keys, so that no score needs a sum over lanes
    scores, weights   [heads of a KV head, keys of the span] float32

LLVM finds neither the transposition nor which sums to keep in registers by itself: written as plain
loops the same takes seven times as long. To be imported only where numba is installed. Arguments
are addresses (int64) and constants, which numba passes as literals.
"""

from pathlib import Path
from typing import Any

from llvmlite import ir

from worker.cpu_kernels import native
from worker.cpu_kernels.native import LANES, Vectors, cgutils, intrinsic, types

_HEADS_AT_ONCE = 8
"""Heads with sums in registers at once; AVX-512 has 32 for them and their operands."""
_FLOAT_BYTES = 4
_LINE_BYTES = 64
_TILE_BYTES = LANES * _FLOAT_BYTES

_address = types.int64
SOURCES = Path(__file__).read_bytes(), native.SOURCE
"""Source code that is compiled into every caller, and is part of its key in numba's cache."""
_float = ir.FloatType()
_floats = ir.VectorType(_float, LANES)
_ints = ir.VectorType(ir.IntType(32), LANES)


def _heads(shared: int) -> list[range]:
    return [
        range(first, min(shared, first + _HEADS_AT_ONCE))
        for first in range(0, shared, _HEADS_AT_ONCE)
    ]


@intrinsic
def transpose_keys(
    typing: Any, keys: Any, offset: Any, out: Any, dim: Any, is_bfloat16: Any
) -> Any:
    """Transpose 16 ``keys``, ``offset`` bytes into each token, to ``out`` [dim, 16] float32."""
    count, narrow = dim.literal_value, is_bfloat16.literal_value
    signature = types.void(_address, _address, _address, dim, is_bfloat16)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        write = Vectors(builder)
        keys, offset, out = arguments[:3]
        starts = [
            builder.add(write.load(keys, ir.IntType(64), 8 * t, align=8), offset)
            for t in range(LANES)
        ]
        # Two bfloat16 values are moved as one of 32 bits: half the shuffles.
        for chunk in range(count // (2 * LANES) if narrow else count // LANES):
            rows = [write.load(start, _ints, chunk * _TILE_BYTES) for start in starts]
            for i, row in enumerate(write.transposed(rows)):
                if not narrow:
                    write.store(row, out, (chunk * LANES + i) * _TILE_BYTES)
                    continue
                at = (chunk * LANES + i) * 2 * _TILE_BYTES
                write.store(builder.shl(row, write.bits(16)), out, at)
                write.store(builder.and_(row, write.bits(0xFFFF0000)), out, at + _TILE_BYTES)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def score_tile(
    typing: Any, queries: Any, keys: Any, out: Any, stride: Any, shared: Any, dim: Any
) -> Any:
    """Score ``queries`` [shared, dim] against transposed ``keys``: ``out`` [shared, 16], with rows
    ``stride`` bytes apart."""
    all_heads, count = shared.literal_value, dim.literal_value
    row_bytes = stride.literal_value
    signature = types.void(_address, _address, _address, stride, shared, dim)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        write = Vectors(builder)
        queries, keys, out = arguments[:3]
        for heads in _heads(all_heads):
            # Few heads: several sums each, since each addition waits for the one before.
            parts = max(1, 4 // len(heads))
            sums: dict[tuple[int, int], Any] = {}
            for d in range(count):
                key = write.load(keys, _floats, d * _TILE_BYTES, align=4)
                for head in heads:
                    at = (head * count + d) * _FLOAT_BYTES
                    query = write.splat(write.load(queries, _float, at, align=4))
                    so_far = sums.get((head, d % parts), write.constant(0.0))
                    sums[head, d % parts] = write.multiply_add(query, key, so_far)
            for head in heads:
                total = sums[head, 0]
                for part in range(1, parts):
                    total = builder.fadd(total, sums[head, part])
                write.store(total, out, head * row_bytes)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def add_values(
    typing: Any,
    weights: Any,
    stride: Any,
    values: Any,
    offset: Any,
    totals: Any,
    shared: Any,
    dim: Any,
    is_bfloat16: Any,
) -> Any:
    """Add ``weights`` [shared, 16] · ``values`` (16 addresses) to ``totals`` [shared, dim]."""
    all_heads, count = shared.literal_value, dim.literal_value
    row_bytes, narrow = stride.literal_value, is_bfloat16.literal_value
    signature = types.void(_address, stride, _address, _address, _address, shared, dim, is_bfloat16)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        write = Vectors(builder)
        weights, _, values, offset, totals = arguments[:5]
        starts = [
            builder.add(write.load(values, ir.IntType(64), 8 * t, align=8), offset)
            for t in range(LANES)
        ]
        for chunk in range(count // LANES):
            for heads in _heads(all_heads):
                places = [(head * count + chunk * LANES) * _FLOAT_BYTES for head in heads]
                sums = [write.load(totals, _floats, place, align=4) for place in places]
                for t, start in enumerate(starts):
                    if narrow:
                        value = write.bfloat16(start, chunk * LANES * 2)
                    else:
                        value = write.load(start, _floats, chunk * _TILE_BYTES, align=4)
                    for i, head in enumerate(heads):
                        at = head * row_bytes + t * _FLOAT_BYTES
                        weight = write.splat(write.load(weights, _float, at, align=4))
                        sums[i] = write.multiply_add(weight, value, sums[i])
                for total, place in zip(sums, places, strict=True):
                    write.store(total, totals, place)
        return context.get_dummy_value()

    return signature, generate


@intrinsic
def exponentials(typing: Any, values: Any, tiles: Any, top: Any) -> Any:
    """Replace ``tiles`` · 16 float32 x ≤ ``top`` by e^(x - top), in place.

    e^x = 2^n · 2^r with n whole and r within ½ of 0; the bits of 2^n are n + 127 as a float's
    exponent, and Taylor's seven terms give 2^r to the last bit but one.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        write = Vectors(builder)
        values, tiles, top = arguments
        highest = write.splat(top)
        with cgutils.for_range(builder, tiles) as loop:
            at = builder.add(values, builder.mul(loop.index, ir.Constant(tiles.type, _TILE_BYTES)))
            x = builder.fsub(write.load(at, _floats, align=4), highest)
            z = builder.fmul(x, write.constant(1.4426950408889634))
            low = write.constant(-126.0)
            z = builder.select(builder.fcmp_ordered(">", z, low), z, low)
            n = builder.fptosi(builder.fsub(z, write.constant(0.5)), _ints)  # z ≤ 0
            whole = builder.sitofp(n, _floats)
            r = builder.fmul(builder.fsub(z, whole), write.constant(0.6931471805599453))
            p = write.constant(1 / 720)
            for term in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
                p = write.multiply_add(p, r, write.constant(term))
            exponent = builder.shl(builder.add(n, write.bits(127)), write.bits(23))
            write.store(builder.fmul(p, builder.bitcast(exponent, _floats)), at)
        return context.get_dummy_value()

    return types.void(_address, types.int64, types.float32), generate


@intrinsic
def prefetch(typing: Any, tokens: Any, offset: Any, nbytes: Any) -> Any:
    """Prefetch ``nbytes`` at ``offset`` of each of the 16 ``tokens`` (addresses)."""
    count = nbytes.literal_value
    signature = types.void(_address, _address, nbytes)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        write = Vectors(builder)
        tokens, offset, _ = arguments
        for t in range(LANES):
            start = builder.add(write.load(tokens, ir.IntType(64), 8 * t, align=8), offset)
            for at in range(0, count, _LINE_BYTES):
                write.fetch(start, at)
        return context.get_dummy_value()

    return signature, generate
