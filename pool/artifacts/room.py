"""Checks disk space before a model is added, and a model's users before it is removed. Also reads
a model into the page cache before its use (PV-4), where the kernel can drop it."""

import contextlib
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from rich.filesize import decimal as size

from catalog.errors import NoMemory, NoRoom
from catalog.models import ModelCatalog
from pool.process.proc import all_pids
from worker.free_memory import memory_free

KEEP_FREE = 0.2
"""Default share of the disk to keep free, as for the cache on disk (WK-5)."""
_PIECE_BYTES: Final = 2**20
_READERS: Final = 4
_SHARE: Final = 0.8
"""Share of the available memory that a model may take."""


def require_room(catalog: ModelCatalog, needed: int, keep_free: float) -> None:
    """Raise ``NoRoom`` if ``needed`` more bytes leave less than ``keep_free`` of the disk free. Its
    size is the used space plus the space available to this user, as in ``df``."""
    catalog.empty_trash()
    catalog.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    disk = shutil.disk_usage(catalog.folder)
    total = disk.used + disk.free
    lacking = needed - (disk.free - int(total * keep_free))
    if needed > 0 and lacking > 0:
        raise NoRoom(
            f"there is no room for {size(needed)}: {size(disk.free)} of {size(total)} are free"
            f" and {keep_free:.0%} must stay free; {size(lacking)} more is needed: make room with"
            " tidegate models remove, or lower --keep-free"
        )


def users_of(folder: Path) -> list[int]:
    """Processes of this user that map files of ``folder`` into memory: they serve from it."""
    users = []
    needle = f"{folder.resolve()}/"
    for pid in all_pids():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if needle in Path(f"/proc/{pid}/maps").read_text(errors="replace"):
                users.append(pid)
    return users


def preload(
    files: Iterable[Path], on_bytes: Callable[[int], None], available: int | None = None
) -> None:
    """Read all of ``files``, several at once. ``available``: usable bytes of memory, including
    cached files; None: as the kernel reports. Raises ``NoMemory`` if the files would not fit, or
    ``OSError``."""
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
