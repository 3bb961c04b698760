"""Tells the C library and the kernel how to handle the memory of weights.

glibc adapts to freed blocks: after the first few, it serves blocks of up to 32 MiB from heaps,
which keep freed memory. That is right for activations, step after step. Staging buffers, however,
would leave holes the size of layers in a process that should hold the weights only once.
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
"""mmap threshold while serving: glibc's maximum, which its own adaptation also reaches."""


@contextmanager
def returning_large_blocks() -> Iterator[None]:
    """Within the ``with`` block, freed memory of 1 MiB or more returns to the system at once.

    Afterwards, the heaps keep blocks of up to 32 MiB, as with glibc's own adaptation. Has no effect
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


def advise_huge_pages(address: int, nbytes: int) -> None:
    """Ask the kernel for 2 MiB pages where they fit, which need fewer page lookups.

    Call this before the memory is written. Has no effect without Linux or if it is forbidden.
    """
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    first = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    length = (address + nbytes - first) // mmap.PAGESIZE * mmap.PAGESIZE
    if advise is not None and sys.platform == "linux" and length > 0:
        advise(ctypes.c_void_p(first), ctypes.c_size_t(length), _MADV_HUGEPAGE)
