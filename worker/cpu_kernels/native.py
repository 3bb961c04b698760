"""Addresses, atomic counters and vectors for compiled functions.

Each is one or a few LLVM instructions (``numba.extending.intrinsic``). Vectors have 16 lanes, which
LLVM maps to one, two or four of the machine's registers. Import this module only if numba is
installed. numba is not typed; these functions take ints (addresses) and floats.
"""

import platform
from collections.abc import Callable
from functools import wraps
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

LITERAL = None
"""The kind of an argument that ``emitted`` passes on as a Python value."""


def emitted(result: Any, *kinds: Any) -> Callable[[Callable[..., Any]], Any]:
    """Make a function that emits code callable from compiled functions. It gets ``Vectors`` and the
    values of its arguments of ``kinds``, and returns the value of ``result``, or None for void."""

    def make(write: Callable[..., Any]) -> Any:
        @wraps(write)  # numba reads the names of arguments
        def typed(typing: Any, *given: Any) -> Any:
            both = list(zip(kinds, given, strict=True))
            signature = result(*(own if kind is LITERAL else kind for kind, own in both))

            def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
                passed = (
                    own.literal_value if kind is LITERAL else value
                    for (kind, own), value in zip(both, values, strict=True)
                )
                made = write(Vectors(builder), *passed)
                return context.get_dummy_value() if made is None else made

            return signature, generate

        return _numba.extending.intrinsic(prefer_literal=True)(typed)

    return make


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


@_numba.extending.intrinsic  # type: ignore[untyped-decorator]
def _as_pointer(typing: Any, address: Any, item: Any) -> Any:
    """``address`` as a pointer to ``item``, a numba type."""
    signature = types.CPointer(item.dtype)(types.int64, item)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return signature, generate


@jitable
def array_at(address: Any, item: Any, shape: Any) -> Any:
    """The array of ``item``, a numba type, at ``address``."""
    return carray(_as_pointer(address, item), shape, item)


@emitted(types.void, types.int64)
def prefetch(write: Vectors, address: Any) -> None:
    """Prefetch the cache line at ``address`` without waiting; the address may be unreadable."""
    write.fetch(address)


@emitted(types.int64, types.int64)
def take(write: Vectors, address: Any) -> Any:
    """Read the int64 at ``address`` and add 1 to it, atomically (acquire and release): a reader of
    the new value also sees earlier writes."""
    one = ir.Constant(_int64, 1)
    return write.builder.atomic_rmw("add", write.at(address, _int64), one, "acq_rel")


@emitted(types.int64, types.int64)
def look_at(write: Vectors, address: Any) -> Any:
    """Read the int64 at ``address``, which other threads ``take``, and see their earlier writes."""
    return write.builder.load_atomic(write.at(address, _int64), "acquire", 8)


@emitted(types.int64, types.int64, types.int64)
def swap(write: Vectors, address: Any, value: Any) -> Any:
    """Read the int64 at ``address`` and set it to ``value``, atomically (acquire and release)."""
    return write.builder.atomic_rmw("xchg", write.at(address, _int64), value, "acq_rel")


@emitted(types.void, types.int64, types.int64)
def swap_first(write: Vectors, address: Any, value: Any) -> None:
    """Set the int64 at ``address`` to ``value`` if it is 0, atomically (acquire and release)."""
    zero = ir.Constant(_int64, 0)
    write.builder.cmpxchg(write.at(address, _int64), zero, value, "acq_rel", "acquire")


@emitted(types.int64)
def cycle(write: Vectors) -> Any:
    """Read the processor's cycle counter."""
    return write.call("llvm.readcyclecounter", _int64)


@emitted(types.void, types.int64, types.int64)
def call_task(write: Vectors, function: Any, job: Any) -> None:
    """Call the task (``team.TeamTask``) at an address with a job."""
    kind = ir.FunctionType(ir.VoidType(), [ir.PointerType(_int64)])
    write.builder.call(write.at(function, kind), [write.at(job, _int64)])


@emitted(types.void)
def pause(write: Vectors) -> None:
    """Pause between two reads, for the core's other thread, if the CPU has such an instruction."""
    if platform.machine() in ("x86_64", "AMD64"):
        write.call("llvm.x86.sse2.pause", ir.VoidType())


LOOKS = 1000
"""Polls of another thread's unfinished work, about 50 µs in total, after which another process is
assumed to hold its core."""
_MANY_LOOKS = 20 * LOOKS
"""The same while no part's time is known yet."""
_PART_DONE = 1
"""Flag of a finished part; before that, the flag is the cycle at which the part began, or 0."""


@jitable
def _next_part(job: Any) -> Any:
    """See ``parts_of``; -1 at the end."""
    at = job.ctypes.data
    part, parts, flags = take(at + 8 * TAKEN), job[PARTS], job[FLAGS]
    if part < parts:
        if flags != 0:
            swap_first(flags + 8 * part, cycle())
        return part
    if flags == 0:
        return -1
    began, looks = cycle(), 0
    while True:
        if look_at(at + 8 * DONE) >= parts:
            return -1
        took = look_at(at + 8 * TOOK)
        if looks > _MANY_LOOKS or (took and looks > LOOKS and cycle() - began > 2 * took):
            break
        pause()
        looks += 1
    for part in range(parts):
        if look_at(flags + 8 * part) != _PART_DONE:
            return part
    return -1


@jitable
def _mark_done(job: Any, part: Any) -> None:
    """Mark a part as done. It counts once, however often it was done."""
    at, flags = job.ctypes.data, job[FLAGS]
    if flags == 0:
        take(at + 8 * DONE)
        return
    began = swap(flags + 8 * part, _PART_DONE)
    if began != _PART_DONE:
        if began:
            swap(at + 8 * TOOK, cycle() - began)
        take(at + 8 * DONE)


@jitable
def parts_of(job: Any) -> Any:
    """The parts of ``job`` that this thread must do; each is marked as done when the next one is
    requested. With flags, this ends only when all parts are done."""
    while True:
        part = _next_part(job)
        if part < 0:
            break
        yield part
        _mark_done(job, part)


@jitable
def is_done(job: Any) -> Any:
    """Whether all parts of a job with flags are done."""
    for part in range(look_at(job + 8 * PARTS)):
        if look_at(look_at(job + 8 * FLAGS) + 8 * part) != _PART_DONE:
            return False
    return True


@emitted(types.float32, types.int64, types.int64)
def largest(write: Vectors, values: Any, tiles: Any) -> Any:
    """Maximum of ``tiles`` · 16 float32 at an address, at least one tile. NaNs are ignored, but a
    NaN in the first tile hides the later values of its lane."""
    builder = write.builder
    highest = cgutils.alloca_once_value(builder, write.load(values, _floats, align=4))
    with cgutils.for_range(builder, tiles) as loop:
        at = builder.add(values, builder.mul(loop.index, ir.Constant(tiles.type, 4 * LANES)))
        value, known = write.load(at, _floats, align=4), builder.load(highest)
        larger = builder.select(builder.fcmp_ordered(">", value, known), value, known)
        builder.store(larger, highest)
    return write.call("llvm.vector.reduce.fmax.v16f32", _float, builder.load(highest))


@jitable
def small_power(r: Any) -> Any:
    """e^``r`` for ``r`` within ln(2) / 2 of 0: seven Taylor terms, exact but for the last bit."""
    p = np.float32(1 / 720)
    p = p * r + np.float32(1 / 120)
    p = p * r + np.float32(1 / 24)
    p = p * r + np.float32(1 / 6)
    p = p * r + np.float32(0.5)
    p = p * r + np.float32(1)
    return p * r + np.float32(1)


@jitable
def store(values: Any, out: Any, is_short: Any, at: Any) -> None:
    """Write float32 ``values`` to the address ``out``, from element ``at`` on; if ``is_short``,
    rounded to bfloat16."""
    width = len(values)
    if not is_short:
        exact = array_at(out + 4 * at, float32, width)
        for i in range(width):
            exact[i] = values[i]
    else:
        bits = values.view(np.uint32)
        rounded = array_at(out + 2 * at, uint16, width)
        for i in range(width):
            half = np.uint32(0x7FFF) + (bits[i] >> np.uint32(16) & np.uint32(1))
            rounded[i] = (bits[i] + half) >> np.uint32(16)
