"""The inner loop of ``block_products`` on AMX, the matrix unit of Intel's CPUs.

A block's bfloat16 values have the layout that AMX needs for its second factor: pairs of adjacent
inputs, 16 outputs per line. AMX registers are "tiles" of 16 lines of 64 bytes. Four tiles hold the
sums of up to 32 rows times 32 outputs. Two more hold a tile of rows and a tile of weights, one of
which is reloaded for each product. Import this module only if numba is installed, and use it only
if ``block_products.tiles_problem`` is None.

With all eight tiles, four loads would be enough instead of five. But both threads of a core share
one set of rename registers: if the other thread (another virtual machine) uses tiles, eight take
1.5 times as long. Four products from the L1 cache took 110 ns instead of 74 then, 33 and 33
otherwise.

Instructions: Intel's Software Developer's Manual, volume 2, LDTILECFG and TDPBF16PS. The sum for a
row and an output depends only on these two, so a row's results do not depend on the batch.
"""

import struct
from pathlib import Path
from typing import Any, Final

from llvmlite import ir

from worker.cpu_kernels.native import Vectors, cgutils

MAX_ROWS: Final = 32
TURN_BYTES: Final = 2048
"""Bytes of weights per iteration ("turn") of the loop: 32 inputs of 32 outputs."""
LINES: Final = 16
"""Rows per tile."""
TURN_INPUTS: Final = 32

SOURCE: Final = Path(__file__).read_bytes()
_TILES: Final = 8
_LINE_BYTES: Final = 64
_PALETTE: Final = 1
_CONFIGURATION: Final = struct.pack(
    "<BB14x8H16x8B8x", _PALETTE, 0, *[_LINE_BYTES] * _TILES, *[LINES] * _TILES
)
_WEIGHT, _ROW = 4, 5
"""Registers; ``2 * row tile + half of a block`` sums their products."""
_ORDER: Final = {1: ((0, 0), (0, 1)), 2: ((0, 0), (1, 0), (1, 1), (0, 1))}
"""Order of the products (row tile, half of a block), by the number of row tiles."""
_byte, _int64, _void = ir.IntType(8), ir.IntType(64), ir.VoidType()


def configure(write: Vectors) -> None:
    """Emit code that configures all tiles of the thread at full size, until ``release``."""
    kind = ir.ArrayType(_byte, len(_CONFIGURATION))
    constant = ir.Constant(kind, bytearray(_CONFIGURATION))
    address = cgutils.global_constant(write.builder, "tile_configuration", constant)
    pointer = write.builder.bitcast(address, ir.PointerType(_byte))
    write.call("llvm.x86.ldtilecfg", _void, pointer)


def release(write: Vectors) -> None:
    """Emit code that releases the tiles, so that a context switch does not save them."""
    write.call("llvm.x86.tilerelease", _void)


def tile_sums(
    write: Vectors,
    rows: Any,
    row_bytes: Any,
    count: Any,
    weights: Any,
    turns: Any,
    ahead: Any,
    ahead_bytes: Any,
    out: Any,
    is_added: Any,
) -> None:
    """Emit code for ``out`` [32, 32] float32: ``count`` (1 to 32) bfloat16 rows times a block.

    ``is_added``: add to the current values. Rows have the layout [rows / 16][turns][16][32], so
    that a tile's lines do not share a cache set, and are ``row_bytes`` long. The number of rows
    read and sums written is rounded up to a multiple of 16. Each turn prefetches ``ahead_bytes``
    from ``ahead`` on: 0, ``TURN_BYTES``, or half of it; half goes only to the L2 cache, because
    other rows come first.
    """
    builder = write.builder
    end = builder.append_basic_block("end")
    for tiles in (1, 2):
        for fetched in (0, TURN_BYTES // 2, TURN_BYTES):
            case = builder.append_basic_block(f"tiles{tiles}_{fetched}")
            other = builder.append_basic_block("other")
            is_many = builder.icmp_signed(">", count, _long(LINES))
            fits = is_many if tiles == 2 else builder.not_(is_many)
            is_it = builder.and_(fits, builder.icmp_signed("==", ahead_bytes, _long(fetched)))
            builder.cbranch(is_it, case, other)
            builder.position_at_end(case)
            _loop(write, tiles, fetched, rows, row_bytes, weights, turns, ahead, out, is_added)
            builder.branch(end)
            builder.position_at_end(other)
    builder.branch(end)
    builder.position_at_end(end)


def _loop(
    write: Vectors,
    tiles: int,
    fetched: int,
    rows: Any,
    row_bytes: Any,
    weights: Any,
    turns: Any,
    ahead: Any,
    out: Any,
    is_added: Any,
) -> None:
    builder, sums = write.builder, range(2 * tiles)
    row_line, block_line = _long(_LINE_BYTES), _long(2 * _LINE_BYTES)

    def number(value: int) -> Any:
        return ir.Constant(_byte, value)

    def load(tile: int, address: Any, stride: Any) -> None:
        pointer = write.at(address, _byte)
        write.call("llvm.x86.tileloadd64", _void, number(tile), pointer, stride)

    def place(total: int) -> Any:
        first = total // 2 * LINES * 2 * _LINE_BYTES + total % 2 * _LINE_BYTES
        return builder.add(out, _long(first))

    with builder.if_else(is_added) as (added, new):
        with added:
            for total in sums:
                load(total, place(total), block_line)
        with new:
            for total in sums:
                write.call("llvm.x86.tilezero", _void, number(total))
    starts = [rows, builder.add(rows, builder.mul(row_bytes, _long(LINES)))][:tiles]
    with cgutils.for_range(builder, turns) as loop:
        line = builder.add(ahead, builder.mul(loop.index, _long(fetched)))
        for offset in range(0, fetched, _LINE_BYTES):
            write.fetch(line, offset, is_near=fetched == TURN_BYTES)
        here = builder.add(weights, builder.mul(loop.index, _long(TURN_BYTES)))
        offset = builder.mul(loop.index, _long(LINES * _LINE_BYTES))
        loaded = -1, -1
        for row, half in _ORDER[tiles]:
            if row != loaded[0]:
                load(_ROW, builder.add(starts[row], offset), row_line)
            if half != loaded[1]:
                load(_WEIGHT, builder.add(here, _long(half * _LINE_BYTES)), block_line)
            loaded = row, half
            registers = map(number, (2 * row + half, _ROW, _WEIGHT))
            write.call("llvm.x86.tdpbf16ps", _void, *registers)
    for total in sums:
        pointer = write.at(place(total), _byte)
        write.call("llvm.x86.tilestored64", _void, number(total), pointer, block_line)


def _long(value: int) -> Any:
    return ir.Constant(_int64, value)
