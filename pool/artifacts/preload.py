"""Reads a model into memory ahead of its use (PV-4).

Cached files are read at the speed of memory when an engine starts. The kernel drops them if any
process needs the memory, so this is not a promise.
"""

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from catalog.errors import NoMemory
from pool.preflight.cpu import memory_free

_PIECE_BYTES: Final = 2**20
_READERS: Final = 4
_SHARE: Final = 0.8
"""Share of the available memory that a model may take."""


def preload(
    files: Iterable[Path], on_bytes: Callable[[int], None], available: int | None = None
) -> None:
    """Read all of ``files``, several at once.

    ``available``: bytes of memory that may be used, cached files included; None: as the kernel
    tells. Raises ``NoMemory`` if they would not fit, ``OSError``.
    """
    files = list(files)
    total = sum(file.stat().st_size for file in files)
    available = memory_free() or 0 if available is None else available
    if total > _SHARE * available:
        raise NoMemory(
            f"{total / 1e9:.1f} GB do not fit into the {available / 1e9:.1f} GB of memory that are"
            f" available, of which {_SHARE:.0%} may be used"
        )

    def read(file: Path) -> None:
        piece = bytearray(_PIECE_BYTES)
        with file.open("rb", buffering=0) as opened:
            while count := opened.readinto(piece):
                on_bytes(count)

    with ThreadPoolExecutor(_READERS) as readers:
        list(readers.map(read, files))
