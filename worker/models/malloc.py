"""Has the C library give large blocks back while weights are loaded.

glibc learns from freed blocks: after the first few it serves blocks of up to 32 MiB from heaps
which keep them. For activations that is right, step after step; for staging it leaves holes the
size of layers in a process that is to hold the weights once.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_LOADING_BYTES: Final = 2**20
_SERVING_BYTES: Final = 32 * 2**20
"""The most that glibc allows, and what it arrives at by itself."""


@contextmanager
def returning_large_blocks() -> Iterator[None]:
    """Within the block, freed memory of 1 MiB and more goes back to the system at once.

    Afterwards the heaps keep blocks of up to 32 MiB, as they would have learnt to. No effect
    without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        yield
        return
    mallopt(_M_MMAP_THRESHOLD, _LOADING_BYTES)
    try:
        yield
    finally:
        mallopt(_M_MMAP_THRESHOLD, _SERVING_BYTES)
        mallopt(_M_TRIM_THRESHOLD, 2 * _SERVING_BYTES)
