"""Measures how much of a model is in the page cache, and brings all of it there.

Cached files are read at the speed of memory when an engine starts. The kernel drops them if any
process needs the memory, so caching is not a promise.
"""

import ctypes
import mmap
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from catalog.errors import NoMemory
from pool.preflight.cpu import memory_free

_PIECE_BYTES: Final = 32 * 2**20
_READERS: Final = 4
_SHARE: Final = 0.8
"""Share of the available memory that a model may take."""


@dataclass(frozen=True, slots=True)
class Residency:
    """Bytes of files in memory and in all; ``resident`` is rounded up to pages."""

    resident: int
    total: int

    @property
    def share(self) -> float:
        return 1.0 if self.total == 0 else min(1.0, self.resident / self.total)


def residency(files: Iterable[Path]) -> Residency:
    """How much of ``files`` memory holds. Raises ``OSError``."""
    resident = total = 0
    for file in files:
        total += file.stat().st_size
        resident += min(file.stat().st_size, _resident(file))
    return Residency(resident, total)


def preload(
    files: Iterable[Path],
    on_bytes: Callable[[int], None] = lambda count: None,
    available: int | None = None,
) -> Residency:
    """Read files into memory, several pieces at once, and measure how much of them is there then.

    ``available``: bytes of memory that may be used; None: as the kernel tells. Raises ``NoMemory``
    if they would not fit, ``OSError``.
    """
    files = list(files)
    found = residency(files)
    available = memory_free() or 0 if available is None else available
    if found.total - found.resident > _SHARE * available:
        raise NoMemory(
            f"{found.total / 1e9:.1f} GB do not fit into the {available / 1e9:.1f} GB of memory"
            f" that are available, of which {_SHARE:.0%} may be used"
        )
    pieces = [
        (file, start) for file in files for start in range(0, file.stat().st_size, _PIECE_BYTES)
    ]
    with ThreadPoolExecutor(_READERS) as pool:
        for count in pool.map(lambda piece: _read(*piece), pieces):
            on_bytes(count)
    return residency(files)


def _read(file: Path, start: int) -> int:
    count = min(_PIECE_BYTES, file.stat().st_size - start)
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, start, count, os.POSIX_FADV_WILLNEED)
        at = start
        while at < start + count:
            piece = os.pread(descriptor, min(2**20, start + count - at), at)
            if not piece:  # the file was cut meanwhile
                break
            at += len(piece)
    finally:
        os.close(descriptor)
    return count


def _resident(file: Path) -> int:
    """Bytes of a file in memory, by mincore(2), for files that we own or may write; the kernel says
    "all" of others."""
    length = file.stat().st_size
    if length == 0:
        return 0
    pages = -(-length // mmap.PAGESIZE)
    vector = (ctypes.c_ubyte * pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    with (
        file.open("rb") as opened,
        mmap.mmap(
            opened.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
        ) as mapped,
    ):
        anchor = ctypes.c_char.from_buffer(mapped)
        address = ctypes.c_void_p(ctypes.addressof(anchor))
        failed = libc.mincore(address, ctypes.c_size_t(length), vector)
        del anchor  # the mapping cannot be closed while something points into it
    if failed:
        raise OSError(ctypes.get_errno(), f"mincore of {file} failed")
    return mmap.PAGESIZE * sum(flag & 1 for flag in vector)
