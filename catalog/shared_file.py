"""The index of a catalog: a small JSON file that several processes read and write.

Readers take no lock: a rename replaces the old version. A lock file next to it serializes writers.
A new version is on disk before it gets its name, so that a crash leaves the old or the new version.
An unreadable file is set aside, never overwritten, and rebuilt from the catalog's folders.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterable, Iterator
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
    """The content of the file: entries, oldest first. ``version`` counts its changes."""

    version: int = 0
    changed_ms: int = 0
    entries: tuple[E, ...] = ()


def ordered(entries: Iterable[E]) -> tuple[E, ...]:
    return tuple(sorted(entries, key=lambda entry: (entry.created_ms, entry.id)))


class SharedFile(Generic[E]):
    """The file at ``path``. ``scan`` finds the entries if it cannot be read.

    Every method raises ``CatalogUnusable`` if the file system refuses.
    """

    def __init__(self, path: Path, kind: type[Index[E]], scan: Callable[[], Iterable[E]]) -> None:
        self.path = path
        self._decoder = msgspec.json.Decoder(kind)
        self._scan = scan

    def read(self) -> Index[E]:
        """The current index; writes only if the file is damaged."""
        index = self._load()
        if index is None and self.path.exists():
            with self.editing():
                index = self._load()
        return index or Index(1, now_ms(), ordered(self._scan()))

    @contextmanager
    def editing(self) -> Iterator[dict[str, E]]:
        """The entries by id, under the lock; changes to them are written at the end."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._locked():
                index = self._load()
                if index is None:
                    with suppress(FileNotFoundError):
                        damaged = f"{self.path.name}.damaged-{time.time_ns()}"
                        self.path.rename(self.path.with_name(damaged))
                    index = Index(1, now_ms(), ordered(self._scan()))
                    self._write(index)
                before = {entry.id: entry for entry in index.entries}
                entries = dict(before)
                yield entries
                if entries != before:
                    version = index.version + 1
                    self._write(Index(version, now_ms(), ordered(entries.values())))
        except OSError as error:
            raise CatalogUnusable(
                f"cannot write {self.path}: {error.strerror or error}; make room and its folder"
                " writable, or choose another one with TIDEGATE_HOME"
            ) from error

    def _load(self) -> Index[E] | None:
        """The index in the file; None if there is no file or its content is invalid."""
        try:
            return self._decoder.decode(self.path.read_bytes())
        except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        except OSError as error:
            raise CatalogUnusable(
                f"cannot read {self.path}: {error.strerror or error}; make it readable, or choose"
                " another folder with TIDEGATE_HOME"
            ) from error

    def _write(self, index: Index[E]) -> None:
        write_atomically(self.path, msgspec.json.format(msgspec.json.encode(index), indent=1))

    @contextmanager
    def _locked(self) -> Iterator[None]:
        lock = os.open(self.path.with_name(self.path.name + ".lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            give_up = time.monotonic() + LOCK_WAIT_S
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > give_up:
                        raise CatalogUnusable(
                            f"{self.path} has been held by another process for {LOCK_WAIT_S:.0f} s:"
                            " try again, or end that process"
                        ) from None
                    time.sleep(_LOOK_S)
            yield
        finally:
            os.close(lock)
