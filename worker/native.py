"""What compiled functions need beyond Python: addresses, atomic counters, vectors.

Each is an LLVM instruction or few (``numba.extending.intrinsic``); the vectors have 16 lanes, which
LLVM makes one, two or four registers of, whatever the machine has. To be imported only where numba
is installed. numba is not typed; these are functions of ints (addresses) and floats.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numba.core.cgutils
import numba.extending
from llvmlite import ir

LANES = 16
SOURCE = Path(__file__).read_bytes()
"""Compiled into all that uses it, and so a constant of that (``compiled``)."""

# What numba says of its types is for plain Python, which none of these is called from.
_numba: Any = numba
types: Any = _numba.types
cgutils: Any = _numba.core.cgutils
carray: Any = _numba.carray
cfunc: Any = _numba.cfunc
float32: Any = types.float32
int64: Any = types.int64
uint16: Any = types.uint16
uint32: Any = types.uint32


def intrinsic(function: Callable[..., Any]) -> Any:
    """numba's, with constants as literals."""
    return _numba.extending.intrinsic(prefer_literal=True)(function)


def jitable(function: Callable[..., Any]) -> Any:
    """To be called by compiled ones; its source is a constant of theirs (``worker.compiled``)."""
    return _numba.extending.register_jitable(function)


_float = ir.FloatType()
_int16, _int32, _int64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)
_floats = ir.VectorType(_float, LANES)
_ints = ir.VectorType(_int32, LANES)


class Vectors:
    """Writes vector code; ``builder`` is llvmlite's."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def at(self, address: Any, kind: Any, offset_bytes: int = 0) -> Any:
        """A pointer to ``kind``."""
        if offset_bytes:
            address = self.builder.add(address, ir.Constant(_int64, offset_bytes))
        return self.builder.inttoptr(address, ir.PointerType(kind))

    def load(self, address: Any, kind: Any, offset_bytes: int = 0, align: int = 2) -> Any:
        return self.builder.load(self.at(address, kind, offset_bytes), align=align)

    def store(self, value: Any, address: Any, offset_bytes: int = 0, align: int = 4) -> None:
        self.builder.store(value, self.at(address, value.type, offset_bytes), align=align)

    def splat(self, scalar: Any) -> Any:
        vector = ir.VectorType(scalar.type, LANES)
        one = self.builder.insert_element(
            ir.Constant(vector, ir.Undefined), scalar, ir.Constant(_int32, 0)
        )
        zeros = ir.Constant(_ints, [0] * LANES)
        return self.builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)

    def constant(self, value: float) -> Any:
        return ir.Constant(_floats, [value] * LANES)

    def bits(self, value: int) -> Any:
        return ir.Constant(_ints, [value] * LANES)

    def call(self, name: str, kind: Any, *arguments: Any) -> Any:
        """An LLVM intrinsic."""
        function_type = ir.FunctionType(kind, [each.type for each in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, function_type, name)
        return self.builder.call(function, arguments)

    def fetch(self, address: Any, offset_bytes: int = 0, *, is_near: bool = True) -> None:
        """Have the cache line there on its way into all caches, or all but the nearest."""
        how = (ir.Constant(_int32, value) for value in (0, 3 if is_near else 2, 1))  # read, data
        line = self.at(address, ir.IntType(8), offset_bytes)
        self.call("llvm.prefetch.p0", ir.VoidType(), line, *how)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """a · b + c."""
        return self.call("llvm.fmuladd.v16f32", _floats, a, b, c)

    def bfloat16(self, address: Any, offset_bytes: int = 0) -> Any:
        """16 of them, as floats: they are the upper halves of these."""
        narrow = self.load(address, ir.VectorType(_int16, LANES), offset_bytes)
        wide = self.builder.shl(self.builder.zext(narrow, _ints), self.bits(16))
        return self.builder.bitcast(wide, _floats)

    def transposed(self, rows: list[Any]) -> list[Any]:
        """16 vectors of 16: lane j of vector i becomes lane i of vector j."""
        step = 1
        while step < LANES:
            new = list(rows)
            for i in range(LANES):
                if i & step:
                    continue
                a, b = rows[i], rows[i + step]
                low = [j if not j & step else LANES + j - step for j in range(LANES)]
                high = [j + step if not j & step else LANES + j for j in range(LANES)]
                for at, lanes in ((i, low), (i + step, high)):
                    mask = ir.Constant(_ints, lanes)
                    new[at] = self.builder.shuffle_vector(a, b, mask)
            rows = new
            step *= 2
        return rows


@intrinsic
def as_pointer(typing: Any, address: Any, item: Any) -> Any:
    """``address`` as a pointer to ``item``, a numba type: for ``numba.carray``."""
    signature = types.CPointer(item.dtype)(types.int64, item)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return signature, generate


@intrinsic
def take(typing: Any, address: Any) -> Any:
    """The int64 at ``address``, which is one more from now on; atomic, and what was written before
    is seen by who sees it."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.PointerType(_int64))
        return builder.atomic_rmw("add", pointer, ir.Constant(_int64, 1), "acq_rel")

    return types.int64(types.int64), generate


@intrinsic
def look_at(typing: Any, address: Any) -> Any:
    """The int64 at ``address``, which others ``take``: what they wrote before is seen."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.PointerType(_int64))
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def pause(typing: Any) -> Any:
    """Between two looks, for the core's other thread. For x86 only."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        Vectors(builder).call("llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def largest(typing: Any, values: Any, tiles: Any) -> Any:
    """Of ``tiles`` · 16 float32 at an address, one tile at least; a NaN is less than any."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        write = Vectors(builder)
        values, tiles = arguments
        highest = cgutils.alloca_once_value(builder, write.load(values, _floats, align=4))
        with cgutils.for_range(builder, tiles) as loop:
            at = builder.add(values, builder.mul(loop.index, ir.Constant(tiles.type, 4 * LANES)))
            value, known = write.load(at, _floats, align=4), builder.load(highest)
            builder.store(
                builder.select(builder.fcmp_ordered(">", value, known), value, known), highest
            )
        return write.call("llvm.vector.reduce.fmax.v16f32", _float, builder.load(highest))

    return types.float32(types.int64, types.int64), generate
