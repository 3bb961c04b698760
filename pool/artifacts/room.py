"""Looks at the disk before a model comes, and at who uses one before it goes."""

import contextlib
import shutil
from pathlib import Path

from rich.filesize import decimal as size

from catalog.errors import NoRoom
from catalog.models import ModelCatalog
from pool.process.proc import all_pids

KEEP_FREE = 0.2
"""Share of the file system that stays free by default."""


def require_room(catalog: ModelCatalog, needed: int, keep_free: float) -> None:
    """Raise ``NoRoom`` if ``needed`` more bytes would leave less than ``keep_free`` of the file
    system free."""
    catalog.empty_trash()
    catalog.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    disk = shutil.disk_usage(catalog.folder)
    lacking = needed - (disk.free - int(disk.total * keep_free))
    if needed > 0 and lacking > 0:
        raise NoRoom(
            f"there is no room for {size(needed)}: {size(disk.free)} of {size(disk.total)} are free"
            f" and {keep_free:.0%} stay so, {size(lacking)} are lacking; tidegate models remove"
            " makes room, and --keep-free says how much stays free"
        )


def users_of(folder: Path) -> list[int]:
    """Processes of this user that have files of ``folder`` in their memory: they serve from it."""
    users = []
    needle = f"{folder.resolve()}/"
    for pid in all_pids():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            if needle in Path(f"/proc/{pid}/maps").read_text(errors="replace"):
                users.append(pid)
    return users
