"""Lets a Triton Python stub that was built for numpy 1 work with numpy 2.

The stubs in the ``nvidia-pytriton`` wheel carry a pybind11 from before numpy 2. It reads an
element's size where numpy 1 kept it in the type descriptor, and numpy 2 keeps the low half of its
flags there (0 for plain types), so every array that crosses the border has element size 0 and a
STRING input kills the process::

    offset in PyArray_Descr     24..27       28..31     32..35        36..39      40..47
    numpy 1 (what pybind reads) kind…flags   type_num   elsize (int)  alignment   …
    numpy 2 (what is there)     kind…flags   type_num   flags (uint64)            elsize

Python 3.13 has no numpy 1, so there the launcher asks for this patch; on 3.11 and 3.12 numpy is
pinned below 2 instead. pybind11 finds numpy through the table in ``_ARRAY_API``. It is given a copy
of the table in which the three functions that hand out descriptors hand out *twins*: copies with
the size written where numpy 1 had it. Twins never enter numpy itself: the function that takes
descriptors is replaced by one that translates back. Arrays on their way out get a twin in place of
their own descriptor; they are views without their own data, which numpy neither clears nor frees by
the descriptor. Twins are never freed.
"""

import ctypes
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

LEGACY_STUB: Final = "TIDEGATE_LEGACY_STUB"
"""The launcher sets this variable if Triton's stub was built for numpy 1."""
# slots of numpy's C API table, fixed by its ABI
_SLOTS = 320
_DESCR_FROM_TYPE = 45
_FROM_ANY = 69
_NEW_FROM_DESCR = 94
_DESCR_CONVERTER = 174

_DESCR_BYTES = type(np.dtype(object)).__basicsize__
_LEGACY_ELSIZE = 32
_ELSIZE = 40
_ARRAY_DESCR = 56
_IMMORTAL = 1 << 30

_pointer = ctypes.c_void_p
_FromType = ctypes.PYFUNCTYPE(_pointer, ctypes.c_int)
_Converter = ctypes.PYFUNCTYPE(ctypes.c_int, _pointer, _pointer)
_FromAny = ctypes.PYFUNCTYPE(
    _pointer, ctypes.py_object, _pointer, ctypes.c_int, ctypes.c_int, ctypes.c_int, _pointer
)
_NewFromDescr = ctypes.PYFUNCTYPE(
    *(_pointer, _pointer, _pointer, ctypes.c_int),
    *(_pointer, _pointer, _pointer, ctypes.c_int, _pointer),
)

_kept: list[object] = []
"""Objects kept alive because C code holds bare pointers to them."""
_twins: dict[int, int] = {}
_originals: dict[int, int] = {}


def is_needed() -> bool:
    """Whether this stub was built for numpy 1 and runs with numpy 2."""
    return os.environ.get(LEGACY_STUB) == "1" and int(np.__version__.split(".")[0]) >= 2


def outgoing(array: NDArray[Any]) -> NDArray[Any]:
    """Return ``array`` with an element size that the stub can read. Object arrays pass through: the
    stub turns them into bytes first. Raises ``RuntimeError`` if numpy's array layout is unknown."""
    if array.dtype == np.object_:
        return array
    view = np.frombuffer(array.tobytes(), dtype=array.dtype).reshape(array.shape)
    slot = _pointer.from_address(id(view) + _ARRAY_DESCR)
    if slot.value != id(view.dtype) or view.flags.owndata:
        raise RuntimeError(f"numpy {np.__version__} has an unknown array layout")
    slot.value = _twin(id(view.dtype))
    return view


def install() -> None:
    """Install the corrected table. Call this before the stub sees its first tensor."""
    module: Any = sys.modules["numpy._core._multiarray_umath"]
    python = ctypes.pythonapi
    python.PyCapsule_GetPointer.restype = _pointer
    python.PyCapsule_GetPointer.argtypes = [ctypes.py_object, ctypes.c_char_p]
    python.PyCapsule_New.restype = ctypes.py_object
    python.PyCapsule_New.argtypes = [_pointer, ctypes.c_char_p, _pointer]

    address = python.PyCapsule_GetPointer(module._ARRAY_API, None)
    real = (_pointer * _SLOTS).from_address(address)
    table = (_pointer * _SLOTS)(*real)
    for slot, callback in _replacements(real).items():
        table[slot] = ctypes.cast(callback, _pointer).value
        _kept.append(callback)
    capsule = python.PyCapsule_New(ctypes.addressof(table), None, None)
    _kept.extend((table, capsule, module._ARRAY_API))
    module._ARRAY_API = capsule
    old_name: Any = importlib.import_module("numpy.core.multiarray")  # pybind11 looks here
    old_name._ARRAY_API = capsule


def _replacements(real: Any) -> dict[int, Any]:
    real_from_type = _FromType(real[_DESCR_FROM_TYPE])
    real_converter = _Converter(real[_DESCR_CONVERTER])
    real_from_any = _FromAny(real[_FROM_ANY])
    real_new = _NewFromDescr(real[_NEW_FROM_DESCR])

    def from_type(type_num: int) -> int:
        return _twin(real_from_type(type_num))

    def converter(source: int, out: int) -> int:
        done: int = real_converter(source, out)
        if done:
            slot = _pointer.from_address(out)
            slot.value = _twin(slot.value or 0)
        return done

    def from_any(source: Any, descr: int, low: int, high: int, flags: int, context: int) -> int:
        if type(source) is bytes:  # a serialised STRING output
            array = outgoing(np.frombuffer(source, dtype=np.uint8))
            _incref(id(array))
            return id(array)
        result: int = real_from_any(source, _original(descr), low, high, flags, context)
        return result

    def new_from_descr(
        kind: int, descr: int, ndim: int, dims: int, strides: int, data: int, flags: int, base: int
    ) -> int:
        args = (kind, _original(descr), ndim, dims, strides, data, flags, base)
        result: int = real_new(*args)
        return result

    pairs: list[tuple[int, Callable[..., Any], Callable[..., int]]] = [
        (_DESCR_FROM_TYPE, _FromType, from_type),
        (_DESCR_CONVERTER, _Converter, converter),
        (_FROM_ANY, _FromAny, from_any),
        (_NEW_FROM_DESCR, _NewFromDescr, new_from_descr),
    ]
    return {slot: prototype(function) for slot, prototype, function in pairs}


def _twin(descr: int) -> int:
    """A copy of a descriptor with the element size at numpy 1's offset."""
    known = _twins.get(descr)
    if known is not None:
        return known
    memory = ctypes.create_string_buffer(ctypes.string_at(descr, _DESCR_BYTES), _DESCR_BYTES)
    elsize = ctypes.c_ssize_t.from_buffer(memory, _ELSIZE).value
    ctypes.c_int.from_buffer(memory, _LEGACY_ELSIZE).value = elsize
    ctypes.c_ssize_t.from_buffer(memory, 0).value = _IMMORTAL
    twin = ctypes.addressof(memory)
    _incref(descr)  # the twin shares its fields
    _kept.append(memory)
    _twins[descr], _originals[twin] = twin, descr
    return twin


def _original(descr: int | None) -> int | None:
    """The descriptor that numpy may see. The callee takes over a reference."""
    if descr is None or descr not in _originals:
        return descr
    original = _originals[descr]
    _incref(original)
    return original


def _incref(address: int) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.cast(address, ctypes.py_object))
