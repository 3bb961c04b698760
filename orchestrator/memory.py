"""Memory goes back to the system when large bodies and prompts are done with."""

import ctypes
from typing import Final

_M_MMAP_THRESHOLD: Final = -3
_LARGE_BYTES: Final = 2**20


def return_large_blocks() -> None:
    """Have blocks of 1 MiB and more mapped one by one, and unmapped when they are freed.

    By default glibc learns from the first freed body to serve blocks up to 32 MiB from heaps, which
    keep them. No effect without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)
