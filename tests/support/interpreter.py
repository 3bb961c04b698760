"""The interpreter of triton 3.7, made right and quick. Needs ``TRITON_INTERPRET=1``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter


@contextmanager
def repaired() -> Iterator[None]:
    """Products of our own, and none of the work that it does again in each call.

    Its own product is numpy's, which takes the bit patterns of bfloat16 for integers, and goes to
    a BLAS in which, on some CPUs, a row's sums depend on its place: tests are to judge our kernels,
    not that. Here every element is the sum of its products in the order of k, in float32.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot)
        patch.setattr(interpreter, "_get_np_dtype", _np_dtype)
        # Each sum of integers is computed a second time in 64 bits, to find those that overflow.
        quick = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
        patch.setattr(interpreter.interpreter_builder, "options", quick)
        patch.setattr(interpreter.InterpretedFunction, "__call__", _call_device_function)
        yield


_of_number = cache(interpreter._get_np_dtype)  # makes a dictionary of all types in each call


def _np_dtype(of: tl.dtype) -> np.dtype[np.generic]:
    return np.dtype(np.uint64) if of.scalar.is_ptr() else _of_number(of.scalar)


def _dot(self: object, a: object, b: object, d: object, precision: object, most: object) -> object:
    products = _widened(a)[:, :, None] * _widened(b)[None]
    # Along an axis that is not the last numpy adds slice by slice, whatever the shape.
    total = np.add.reduce(products, axis=1) + d.data  # type: ignore[attr-defined]
    return interpreter.TensorHandle(total, d.dtype.scalar)  # type: ignore[attr-defined]


def _widened(handle: object) -> NDArray[np.float32]:
    """The values of a tensor of the interpreter, which keeps bfloat16 as bit patterns."""
    data: NDArray[np.generic] = handle.data  # type: ignore[attr-defined]
    if handle.dtype.scalar == tl.bfloat16:  # type: ignore[attr-defined]
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)


_ready: set[Callable[..., object]] = set()


def _call_device_function(
    self: interpreter.InterpretedFunction, *args: object, **named: object
) -> object:
    """As its own, which replaces the language's functions in each call: once is enough."""
    if self.fn not in _ready:
        interpreter._patch_lang(self.fn)
        _ready.add(self.fn)
    return self.rewrite()(*args, **named)
