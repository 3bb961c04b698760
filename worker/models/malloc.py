"""Tells the C library and the kernel how to treat the memory of weights.

glibc learns from freed blocks: after the first few it serves blocks of up to 32 MiB from heaps
which keep them. For activations that is right, step after step; for staging it leaves holes the
size of layers in a process that is to hold the weights once.
"""

import ctypes
import mmap
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_M_TRIM_THRESHOLD: Final = -1
_M_MMAP_THRESHOLD: Final = -3
_MADV_HUGEPAGE: Final = 14
_LOADING_BYTES: Final = 2**20
_SERVING_BYTES: Final = 32 * 2**20
"""mmap threshold while serving: the most that glibc allows, and what it arrives at by itself."""


@contextmanager
def returning_large_blocks() -> Iterator[None]:
    """Within the block, freed memory of 1 MiB and more goes back to the system at once.

    Afterwards the heaps keep blocks of up to 32 MiB, as glibc would have come to do by itself.
    No effect without glibc.
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


def advise_huge_pages(address: int, nbytes: int) -> None:
    """Have the kernel use pages of 2 MiB where they fit, so that fewer have to be looked up.

    To be called before the memory is written to. No effect without Linux, or where it is forbidden.
    """
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if advise is not None and sys.platform == "linux" and length > 0:
        advise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_HUGEPAGE)
