"""Decides whether a model fits on the disk, and which others would have to go."""

import contextlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from catalog.errors import NoRoom
from catalog.model_entry import ModelEntry, ModelState
from catalog.models import ModelCatalog
from pool.artifacts.sizes import size
from pool.process.proc import all_pids

KEEP_FREE = 0.2
"""Share of the file system that stays free by default."""


@dataclass(frozen=True, slots=True)
class Kept:
    """A model that could make room, and the bytes that removing it would free."""

    entry: ModelEntry
    bytes: int


@dataclass(frozen=True, slots=True)
class DiskState:
    """State of the disk, in bytes. ``models`` is what models take, complete or not."""

    total: int
    free: int
    models: int


@dataclass(frozen=True, slots=True)
class DiskBudget:
    """Limits on models: ``most_bytes`` for all together (None: no bound), and ``keep_free``, the
    share of the file system that must stay free."""

    keep_free: float = KEEP_FREE
    most_bytes: int | None = None


def to_remove(
    needed: int, disk: DiskState, budget: DiskBudget, kept: Sequence[Kept]
) -> tuple[Kept, ...]:
    """The models that have to go for ``needed`` more bytes, least recently used first.

    Raises ``NoRoom`` if even all of them would not be enough. Pure.
    """
    if needed <= 0:
        return ()
    lacking = needed - (disk.free - int(disk.total * budget.keep_free))
    over = 0 if budget.most_bytes is None else disk.models + needed - budget.most_bytes
    lacking = max(lacking, over)
    removed: list[Kept] = []
    for each in sorted(kept, key=lambda each: each.entry.used_ms or each.entry.created_ms):
        if lacking <= 0:
            break
        if each.bytes:
            removed.append(each)
            lacking -= each.bytes
    if lacking > 0:
        raise NoRoom(
            f"there is no room for {size(needed)}: {size(disk.free)} of {size(disk.total)} are free"
            f" and {budget.keep_free:.0%} stay so, models take {size(disk.models)}"
            + ("" if budget.most_bytes is None else f" and may take {size(budget.most_bytes)}")
            + f"; {size(lacking)} are lacking even without every model that nobody uses: make room,"
            " or change --keep-free or --max-disk"
        )
    return tuple(removed)


def make_room(
    catalog: ModelCatalog, needed: int, budget: DiskBudget, *, agreed: bool, but: str = ""
) -> None:
    """Remove models to make room for ``needed`` more bytes, never the one with the id ``but``.

    Raises ``NoRoom``, which names the models that would have to go, if that was not ``agreed`` to.
    """
    catalog.empty_trash()
    kept = [
        Kept(entry, _freed_by(catalog.path_of(entry)))
        for entry in catalog.entries()
        if entry.state is not ModelState.STAGING
        and entry.id != but
        and not users_of(catalog.path_of(entry))
    ]
    going = to_remove(needed, disk_state(catalog), budget, kept)
    if going and not agreed:
        names = ", ".join(f"{each.entry.name} ({size(each.bytes)})" for each in going)
        raise NoRoom(
            f"there is room for {size(needed)} more only without {names}, least recently used:"
            " --yes removes that"
        )
    for each in going:
        catalog.remove(each.entry)


def disk_state(catalog: ModelCatalog) -> DiskState:
    """The state of the file system that the models are on."""
    catalog.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    usage = shutil.disk_usage(catalog.folder)
    return DiskState(
        usage.total, usage.free, sum(stat.st_blocks * 512 for stat in _files(catalog.folder))
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


def _freed_by(folder: Path) -> int:
    """Bytes that deleting ``folder`` frees: a file with another name elsewhere frees nothing."""
    return sum(stat.st_blocks * 512 for stat in _files(folder) if stat.st_nlink == 1)


def _files(folder: Path) -> list[os.stat_result]:
    found = []
    for path in folder.rglob("*"):
        try:
            stat = path.lstat()
        except FileNotFoundError:
            continue
        if path.is_file():
            found.append(stat)
    return found
