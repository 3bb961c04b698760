"""Addresses, atomic counters and vectors for compiled functions.

Each is one or a few LLVM instructions (``numba.extending.intrinsic``). Vectors have 16 lanes, which
LLVM maps to one, two or four of the machine's registers. Import this module only if numba is
installed. numba is not typed; these functions take ints (addresses) and floats.
"""

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numba.core.cgutils
import numba.extending
import numpy as np
from llvmlite import ir

from worker.cpu_kernels.team import DONE, FLAGS, PARTS, TAKEN, TOOK

LANES = 16
SOURCE = Path(__file__).read_bytes()
"""Source of this module: its users compile it in, so it is one of their constants."""

# numba's own annotations are for plain Python, which calls none of these.
_numba: Any = numba
types: Any = _numba.types
cgutils: Any = _numba.core.cgutils
carray: Any = _numba.carray
cfunc: Any = _numba.cfunc
float32: Any = types.float32
float64: Any = types.float64
int64: Any = types.int64
uint16: Any = types.uint16
uint32: Any = types.uint32


def intrinsic(function: Callable[..., Any]) -> Any:
    """numba's ``intrinsic``, with constants passed as literals."""
    return _numba.extending.intrinsic(prefer_literal=True)(function)


def jitable(function: Callable[..., Any]) -> Any:
    """Make ``function`` callable from compiled functions; its source is one of their constants."""
    return _numba.extending.register_jitable(function)


_float = ir.FloatType()
_int32, _int64 = ir.IntType(32), ir.IntType(64)
_floats = ir.VectorType(_float, LANES)
_ints = ir.VectorType(_int32, LANES)


class Vectors:
    """Emits vector code with llvmlite's ``builder``."""

    def __init__(self, builder: Any) -> None:
        self.builder = builder

    def at(self, address: Any, kind: Any, offset_bytes: int = 0) -> Any:
        """A pointer to ``kind`` at ``address`` plus ``offset_bytes``."""
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

    def call(self, name: str, kind: Any, *arguments: Any, fast: tuple[str, ...] = ()) -> Any:
        """Call the LLVM intrinsic ``name``, which returns a ``kind``, with fast-math flags."""
        function_type = ir.FunctionType(kind, [each.type for each in arguments])
        function = cgutils.get_or_insert_function(self.builder.module, function_type, name)
        return self.builder.call(function, arguments, fastmath=fast)

    def fetch(self, address: Any, offset_bytes: int = 0, *, is_near: bool = True) -> None:
        """Prefetch the cache line at ``address`` into all caches, or all except L1."""
        how = (ir.Constant(_int32, value) for value in (0, 3 if is_near else 2, 1))  # read, data
        line = self.at(address, ir.IntType(8), offset_bytes)
        self.call("llvm.prefetch.p0", ir.VoidType(), line, *how)

    def multiply_add(self, a: Any, b: Any, c: Any) -> Any:
        """a · b + c."""
        return self.call("llvm.fmuladd.v16f32", _floats, a, b, c)


@intrinsic
def as_pointer(typing: Any, address: Any, item: Any) -> Any:
    """``address`` as a pointer to ``item``, a numba type: for ``numba.carray``."""
    signature = types.CPointer(item.dtype)(types.int64, item)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return signature, generate


@intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Prefetch the cache line at ``address`` without waiting; the address may be unreadable."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        Vectors(builder).fetch(arguments[0])
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def take(typing: Any, address: Any) -> Any:
    """Read the int64 at ``address`` and add 1 to it, atomically (acquire and release): a reader of
    the new value also sees earlier writes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.PointerType(_int64))
        return builder.atomic_rmw("add", pointer, ir.Constant(_int64, 1), "acq_rel")

    return types.int64(types.int64), generate


@intrinsic
def look_at(typing: Any, address: Any) -> Any:
    """Read the int64 at ``address``, which other threads ``take``, and see their earlier writes."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.PointerType(_int64))
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def swap(typing: Any, address: Any, value: Any) -> Any:
    """Read the int64 at ``address`` and set it to ``value``, atomically (acquire and release)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.PointerType(_int64))
        return builder.atomic_rmw("xchg", pointer, arguments[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def swap_first(typing: Any, address: Any, value: Any) -> Any:
    """Set the int64 at ``address`` to ``value`` if it is 0, atomically (acquire and release)."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = builder.inttoptr(arguments[0], ir.PointerType(_int64))
        zero = ir.Constant(_int64, 0)
        builder.cmpxchg(pointer, zero, arguments[1], "acq_rel", "acquire")
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def cycle(typing: Any) -> Any:
    """Read the processor's cycle counter."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return Vectors(builder).call("llvm.readcyclecounter", _int64)

    return types.int64(), generate


@intrinsic
def call_task(typing: Any, function: Any, job: Any) -> Any:
    """Call the task (``team.TeamTask``) at an address with a job."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = ir.PointerType(_int64)
        kind = ir.PointerType(ir.FunctionType(ir.VoidType(), [pointer]))
        job = builder.inttoptr(arguments[1], pointer)
        builder.call(builder.inttoptr(arguments[0], kind), [job])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def pause(typing: Any) -> Any:
    """Pause between two reads, for the core's other thread, if the CPU has such an instruction."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            Vectors(builder).call("llvm.x86.sse2.pause", ir.VoidType())
        return context.get_dummy_value()

    return types.void(), generate


LOOKS = 1000
"""Polls of another thread's unfinished work, about 50 µs in total, after which another process is
assumed to hold its core."""
_MANY_LOOKS = 20 * LOOKS
"""The same while no part's time is known yet."""
_PART_DONE = 1
"""Flag of a finished part; before that, the flag is the cycle at which the part began, or 0."""


@jitable
def next_part(job: Any) -> Any:
    """The next part that this thread must do of the job at an address; -1 if no part is left and,
    with flags, all parts are done."""
    part, parts = take(job + 8 * TAKEN), look_at(job + 8 * PARTS)
    flags = look_at(job + 8 * FLAGS)
    if part < parts:
        if flags != 0:
            swap_first(flags + 8 * part, cycle())
        return part
    if flags == 0:
        return -1
    began, looks = cycle(), 0
    while True:
        if look_at(job + 8 * DONE) >= parts:
            return -1
        took = look_at(job + 8 * TOOK)
        if looks > _MANY_LOOKS or (took and looks > LOOKS and cycle() - began > 2 * took):
            break
        pause()
        looks += 1
    for part in range(parts):
        if look_at(flags + 8 * part) != _PART_DONE:
            return part
    return -1


@jitable
def part_done(job: Any, part: Any) -> None:
    """Mark a part as done. It counts once, however often it was done."""
    flags = look_at(job + 8 * FLAGS)
    if flags == 0:
        take(job + 8 * DONE)
        return
    began = swap(flags + 8 * part, _PART_DONE)
    if began != _PART_DONE:
        if began:
            swap(job + 8 * TOOK, cycle() - began)
        take(job + 8 * DONE)


@jitable
def is_done(job: Any) -> Any:
    """Whether all parts of a job with flags are done."""
    for part in range(look_at(job + 8 * PARTS)):
        if look_at(look_at(job + 8 * FLAGS) + 8 * part) != _PART_DONE:
            return False
    return True


@intrinsic
def largest(typing: Any, values: Any, tiles: Any) -> Any:
    """Maximum of ``tiles`` · 16 float32 at an address, at least one tile. NaNs are ignored, but a
    NaN in the first tile hides the later values of its lane."""

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


@jitable
def store(values: Any, out: Any, short: Any, at: Any) -> None:
    """Write ``values`` to the result addresses ``out`` and ``short``, from element ``at`` on."""
    width = len(values)
    if out != 0:
        exact = carray(as_pointer(out + 4 * at, float32), (width,), float32)
        for i in range(width):
            exact[i] = values[i]
    if short != 0:
        bits = values.view(np.uint32)
        rounded = carray(as_pointer(short + 2 * at, uint16), (width,), uint16)
        for i in range(width):
            half = np.uint32(0x7FFF) + (bits[i] >> np.uint32(16) & np.uint32(1))
            rounded[i] = (bits[i] + half) >> np.uint32(16)
