"""The entries of a catalog: each is a small JSON file, the manifest, in a folder of its own.

Readers take no lock, because a manifest is replaced in one step. A lock serializes writers.
"""

import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec

from catalog.atomic import write_atomically
from catalog.errors import CatalogUnusable

LOCK_WAIT_S = 10.0
_LOOK_S = 0.02


class Listed(Protocol):
    """What an index needs to know of an entry."""

    @property
    def id(self) -> str: ...
    @property
    def created_ms(self) -> int: ...


E = TypeVar("E", bound=Listed)


def now_ms() -> int:
    """The current time in Unix milliseconds."""
    return time.time_ns() // 1_000_000


class Index(msgspec.Struct, Generic[E], frozen=True):
    """Entries, oldest first, and the time of the last change in Unix ms (0 without a folder)."""

    entries: tuple[E, ...]
    changed_ms: int


def ordered(entries: Iterable[E]) -> tuple[E, ...]:
    return tuple(sorted(entries, key=lambda entry: (entry.created_ms, entry.id)))


def read_manifests(folder: Path, name: str, kind: type[E]) -> Index[E]:
    """The entries whose manifests are in ``folder/<id>/<name>``. Damaged manifests are passed over.
    Raises ``CatalogUnusable``."""
    entries = []
    try:
        changed_ns = folder.stat().st_mtime_ns
        manifests = [each / name for each in folder.iterdir()]
    except FileNotFoundError:
        return Index((), 0)
    except OSError as error:
        raise CatalogUnusable(
            f"cannot read {folder}: {error.strerror or error}; make it readable, or choose"
            " another folder with TIDEGATE_HOME"
        ) from error
    for path in manifests:
        with suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError):
            entry = msgspec.json.decode(path.read_bytes(), type=kind)
            if entry.id == path.parent.name:
                entries.append(entry)
                changed_ns = max(changed_ns, path.stat().st_mtime_ns)
    return Index(ordered(entries), changed_ns // 1_000_000)


def write_manifest(path: Path, entry: Listed) -> None:
    write_atomically(path, msgspec.json.format(msgspec.json.encode(entry), indent=1))


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Hold the lock of the catalog in ``folder``. Raises ``CatalogUnusable`` if another process
    holds it for too long, or for any ``OSError`` of the body."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = os.open(folder / "catalog.lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            _take(lock, folder)
            yield
        finally:
            os.close(lock)
    except CatalogUnusable:
        raise
    except OSError as error:
        raise CatalogUnusable(
            f"cannot write to {folder}: {error.strerror or error}; make room and the folder"
            " writable, or choose another one with TIDEGATE_HOME"
        ) from error


def _take(lock: int, folder: Path) -> None:
    give_up = time.monotonic() + LOCK_WAIT_S
    while True:
        try:
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > give_up:
                raise CatalogUnusable(
                    f"{folder} has been held by another process for {LOCK_WAIT_S:.0f} s: try"
                    " again, or end that process"
                ) from None
            time.sleep(_LOOK_S)
