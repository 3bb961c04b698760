"""The inner loop of ``block_products``, as vector code.

LLVM alone would not keep the sums in registers and would not read a weight only once for all rows.
``amx_code`` has the loop for AMX. Import this module only if numba is installed.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from llvmlite import binding, ir

from worker.cpu_kernels import amx_code, native
from worker.cpu_kernels.block_job import Form
from worker.cpu_kernels.compiled import cpu_features, has_dots
from worker.cpu_kernels.native import LITERAL, Vectors, cgutils, emitted, jitable, types

MAX_ROWS: Final = 12 if "avx512f" in cpu_features() else 3
"""Maximum rows at once. With two vectors per row, sums take 24 of AVX-512's 32 registers or, since
a vector is two registers with AVX2, 12 of its 16."""
BLOCK_OUTPUTS: Final = 32
TURN_BYTES: Final = 128
"""Bytes of weights per iteration ("turn") of the loop: 4 per output."""

SOURCES = (Path(__file__).read_bytes(), amx_code.SOURCE, native.SOURCE)
"""Source code that is compiled into every caller and is part of its key in numba's cache."""
_VECTOR_BYTES = 64
CACHE_LINE: Final = 64
_int32, _int64 = ir.IntType(32), ir.IntType(64)
_float = ir.FloatType()
_floats = ir.VectorType(_float, native.LANES)
_shorts = ir.VectorType(ir.IntType(16), native.LANES)
_ints = ir.VectorType(_int32, native.LANES)


@jitable
def aligned(sums: Any) -> Any:
    """The first address in ``sums`` aligned to a cache line; ``sums`` has a spare line."""
    return (sums.ctypes.data + CACHE_LINE - 1) // CACHE_LINE * CACHE_LINE


@emitted(types.void, LITERAL)
def begin(write: Vectors, form: int) -> None:
    """Prepare this thread for its first ``block_sums``."""
    if form == Form.TILES:
        amx_code.configure(write)


@emitted(types.void, LITERAL)
def end(write: Vectors, form: int) -> None:
    """Clean up after this thread's last ``block_sums``."""
    if form == Form.TILES:
        amx_code.release(write)


@emitted(types.void, *[types.int64] * 8, types.boolean, LITERAL)
def block_sums(
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
    form: int,
) -> None:
    """Set ``out`` [count, 32] float32 to ``count`` (1 to 12) rows times a block of ``form``.

    Each turn prefetches the two cache lines at ``ahead``, which then advances by ``ahead_bytes``.
    For tiles and for ``is_added``, which only they use, see ``amx_code.tile_sums``.
    """
    arguments = rows, row_bytes, count, weights, turns, ahead, ahead_bytes, out
    if form == Form.TILES:
        amx_code.tile_sums(write, *arguments, is_added)
        return

    def write_sums(builder: Any, arguments: Any) -> None:
        rows, row_bytes, count, weights, turns, ahead, ahead_bytes, out = arguments
        write = Vectors(builder)
        end = builder.append_basic_block("end")
        switch = builder.switch(count, end)
        for number in range(1, MAX_ROWS + 1):
            case = builder.append_basic_block(f"rows{number}")
            switch.add_case(_long(number), case)
            builder.position_at_end(case)
            starts = [builder.add(rows, builder.mul(row_bytes, _long(i))) for i in range(number)]
            sums = _loop(write, Form(form), starts, weights, turns, ahead, ahead_bytes)
            for i, vector in enumerate(sums):
                write.store(vector, out, _VECTOR_BYTES * i)
            builder.branch(end)
        builder.position_at_end(end)

    _call_once_written(write.builder, f"block_sums_{form}", arguments, write_sums)


def _call_once_written(
    builder: Any, name: str, arguments: Any, write: Callable[[Any, Any], None]
) -> None:
    """Call the module's function ``name``, whose code ``write`` emits: long code with two callers
    is then compiled once."""
    kind = ir.FunctionType(ir.VoidType(), [each.type for each in arguments])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    if function.is_declaration:
        function.linkage = "internal"
        inner = ir.IRBuilder(function.append_basic_block("entry"))
        write(inner, function.args)
        inner.ret_void()
    builder.call(function, arguments)


@emitted(types.void, types.int64, types.int64, types.int64, types.boolean)
def finish(write: Vectors, sums: Any, bias: Any, out: Any, is_gated: Any) -> None:
    """Set ``out`` to one row's ``sums`` [32] float32 + ``bias``; gated: SiLU of the first 16 times
    the other 16, + ``bias``. All are addresses; ``out`` may be ``sums``; ``bias`` 0: no bias.
    """
    builder = write.builder
    values = [write.load(sums, _floats, offset, align=4) for offset in (0, _VECTOR_BYTES)]

    def put(values: list[Any]) -> None:
        # Write each value once: a late thread may write again while another reads (``team``).
        with builder.if_else(builder.icmp_signed("!=", bias, _long(0))) as (with_bias, without):
            with with_bias:
                for i, value in enumerate(values):
                    mine = write.load(bias, _floats, _VECTOR_BYTES * i, align=4)
                    write.store(builder.fadd(value, mine), out, _VECTOR_BYTES * i)
            with without:
                for i, value in enumerate(values):
                    write.store(value, out, _VECTOR_BYTES * i)

    with builder.if_else(is_gated) as (gated, plain):
        with gated:
            put([builder.fmul(_silu(write, values[0]), values[1])])
        with plain:
            put(values)


@emitted(types.void, types.int64, types.int64)
def rounded(write: Vectors, values: Any, out: Any) -> None:
    """Round float32 ``values`` [32] to bfloat16 ``out``: to nearest, ties to even; keeps NaN."""
    for i in (0, 1):
        value = write.load(values, _floats, _VECTOR_BYTES * i, align=4)
        write.store(_narrowed(write, value), out, _VECTOR_BYTES // 2 * i, align=2)


@emitted(types.float32, types.int64, types.int64, types.int64, types.float32)
def top_of(write: Vectors, scores: Any, step_bytes: Any, blocks: Any, known: Any) -> Any:
    """The maximum of ``known`` and the float32 scores of ``blocks`` blocks of 32 keys,
    ``step_bytes`` apart. NaNs are ignored."""
    builder = write.builder
    highest = cgutils.alloca_once_value(builder, write.splat(known))
    with cgutils.for_range(builder, blocks) as loop:
        line = builder.add(scores, builder.mul(loop.index, step_bytes))
        best = builder.load(highest)
        for offset in (0, _VECTOR_BYTES):
            value = write.load(line, _floats, offset, align=4)
            best = builder.select(builder.fcmp_ordered(">", value, best), value, best)
        builder.store(best, highest)
    return write.call("llvm.vector.reduce.fmax.v16f32", _float, builder.load(highest))


@emitted(types.float32, *[types.int64] * 3, types.float32, types.float32, types.int64, LITERAL)
def shares_of(
    write: Vectors,
    scores: Any,
    step_bytes: Any,
    blocks: Any,
    top: Any,
    scale: Any,
    out: Any,
    form: int,
) -> Any:
    """Set ``out`` [blocks * 32], as rows of ``form``, to e^((score - ``top``) · ``scale``) of the
    scores (``top_of``). Returns their sum before rounding."""
    builder, top = write.builder, write.splat(top)
    factor = builder.fmul(write.splat(scale), write.constant(1 / math.log(2)))
    item = 2 if form == Form.DOTS else 4
    sums = cgutils.alloca_once_value(builder, write.constant(0.0))
    with cgutils.for_range(builder, blocks) as loop:
        line = builder.add(scores, builder.mul(loop.index, step_bytes))
        into = builder.add(out, builder.mul(loop.index, _long(item * BLOCK_OUTPUTS)))
        total = builder.load(sums)
        for i in (0, 1):
            score = write.load(line, _floats, _VECTOR_BYTES * i, align=4)
            exponent = builder.fmul(builder.fsub(score, top), factor)
            is_nan = builder.fcmp_unordered("uno", exponent, exponent)
            share = builder.select(is_nan, exponent, _power(write, exponent))
            total = builder.fadd(total, share)
            value = share if item == 4 else _narrowed(write, share)
            write.store(value, into, item * native.LANES * i, align=item)
        builder.store(total, sums)
    zero = ir.Constant(_float, 0.0)
    return write.call(
        "llvm.vector.reduce.fadd.v16f32", _float, zero, builder.load(sums), fast=("reassoc",)
    )


@emitted(types.void, types.int64, types.float32, types.int64)
def add_scaled(write: Vectors, total: Any, scale: Any, sums: Any) -> None:
    """Set ``total`` [32] float32 to ``total`` · ``scale`` + ``sums`` [32]."""
    factor = write.splat(scale)
    for offset in (0, _VECTOR_BYTES):
        held = write.load(total, _floats, offset, align=4)
        new = write.load(sums, _floats, offset, align=4)
        write.store(write.multiply_add(held, factor, new), total, offset)


def _narrowed(write: Vectors, values: Any) -> Any:
    """float32 ``values`` as bfloat16: to nearest, ties to even; keeps NaN."""
    builder = write.builder
    bits = builder.bitcast(values, _ints)
    odd = builder.and_(builder.lshr(bits, write.bits(16)), write.bits(1))
    near = builder.add(builder.add(bits, write.bits(0x7FFF)), odd)
    is_nan = builder.fcmp_unordered("uno", values, values)
    near = builder.select(is_nan, builder.or_(bits, write.bits(0x400000)), near)
    return builder.trunc(builder.lshr(near, write.bits(16)), _shorts)


def _power(write: Vectors, exponent: Any) -> Any:
    """2^``exponent``, limited to ±126: an integer power, made from a float's bits, times Taylor
    terms of 2^r with r within ½ of 0 (as in ``attention_loops``)."""
    builder = write.builder
    most, least = write.constant(126.0), write.constant(-126.0)
    z = builder.select(builder.fcmp_ordered("<", exponent, most), exponent, most)  # also limits NaN
    z = builder.select(builder.fcmp_ordered(">", z, least), z, least)
    whole = write.call("llvm.floor.v16f32", _floats, builder.fadd(z, write.constant(0.5)))
    r = builder.fmul(builder.fsub(z, whole), write.constant(math.log(2)))
    p = write.constant(1 / 720)
    for factor in (1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0):
        p = write.multiply_add(p, r, write.constant(factor))
    bits = builder.add(builder.fptosi(whole, _ints), write.bits(127))
    return builder.fmul(p, builder.bitcast(builder.shl(bits, write.bits(23)), _floats))


def _silu(write: Vectors, x: Any) -> Any:
    """x / (1 + e^-x)."""
    power = _power(write, write.builder.fmul(x, write.constant(-1 / math.log(2))))
    return write.builder.fdiv(x, write.builder.fadd(power, write.constant(1.0)))


def _loop(
    write: Vectors,
    form: Form,
    starts: list[Any],
    weights: Any,
    turns: Any,
    ahead: Any,
    ahead_bytes: Any,
) -> list[Any]:
    """Sums of the rows that begin at ``starts``, two vectors per row."""
    builder = write.builder
    before = builder.block
    body = builder.append_basic_block("turn")
    after = builder.append_basic_block("turned")
    builder.branch(body)
    builder.position_at_end(body)
    turn, line = builder.phi(_int64), builder.phi(_int64)
    turn.add_incoming(_long(0), before)
    line.add_incoming(ahead, before)
    carried = [builder.phi(_floats) for _ in range(2 * len(starts))]
    for phi in carried:
        phi.add_incoming(write.constant(0.0), before)

    for offset in (0, CACHE_LINE):
        write.fetch(line, offset)
    here = builder.add(weights, builder.mul(turn, _long(TURN_BYTES)))
    halves = [write.load(here, _ints, offset, align=4) for offset in (0, _VECTOR_BYTES)]
    first = builder.mul(turn, _long(4 if form == Form.DOTS else 4 * form.inputs_per_turn))
    sums: list[Any] = list(carried)
    if form == Form.DOTS:
        _add_dots(write, starts, first, halves, sums)
    else:
        _add_products(write, form, starts, first, halves, sums)

    following = builder.add(turn, _long(1))
    turn.add_incoming(following, body)
    line.add_incoming(builder.add(line, ahead_bytes), body)
    for phi, total in zip(carried, sums, strict=True):
        phi.add_incoming(total, body)
    builder.cbranch(builder.icmp_signed("<", following, turns), body, after)
    builder.position_at_end(after)
    return sums


def _add_products(
    write: Vectors, form: Form, starts: list[Any], first: Any, halves: list[Any], sums: list[Any]
) -> None:
    """Add one turn of float32 rows, ``first`` bytes after ``starts``, to ``sums``."""
    for i in range(form.inputs_per_turn):
        wide = [_widened(write, form == Form.BFLOAT16, i, half) for half in halves]
        for row, start in enumerate(starts):
            at = write.builder.add(start, first)
            value = write.splat(write.load(at, _float, 4 * i, align=4))
            for half in (0, 1):
                sums[2 * row + half] = write.multiply_add(value, wide[half], sums[2 * row + half])


def _add_dots(
    write: Vectors, starts: list[Any], first: Any, halves: list[Any], sums: list[Any]
) -> None:
    """Add one turn of bfloat16 rows, ``first`` bytes after ``starts``, to ``sums``."""
    for row, start in enumerate(starts):
        pair = write.splat(write.load(write.builder.add(start, first), _int32, align=2))
        for half in (0, 1):
            at = 2 * row + half
            sums[at] = dot(write, pair, halves[half], sums[at], has_dots())


def dot(write: Vectors, a: Any, b: Any, sums: Any, is_native: bool) -> Any:
    """``sums`` plus the products of ``a`` and ``b``, pairs of bfloat16: by one instruction or, to
    test the form on CPUs without it, by two multiply-adds."""
    if is_native:  # LLVM's intrinsic takes bfloat16, a type that llvmlite lacks
        binding.initialize_native_asmparser()
        kind = ir.FunctionType(_floats, [_floats, _ints, _ints])
        code = ir.InlineAsm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v")
        return write.builder.call(code, [sums, a, b])
    for i in (1, 0):  # in the instruction's order
        sums = write.multiply_add(_widened(write, True, i, a), _widened(write, True, i, b), sums)
    return sums


def _widened(write: Vectors, narrow: bool, i: int, words: Any) -> Any:
    """``words`` as float32; if ``narrow``, the ``i``-th bfloat16 of each pair."""
    if narrow and i == 0:
        words = write.builder.shl(words, write.bits(16))
    elif narrow:
        words = write.builder.and_(words, write.bits(0xFFFF0000))
    return write.builder.bitcast(words, _floats)


def _long(value: int) -> Any:
    return ir.Constant(_int64, value)
