"""A small JSON file that several processes read and write.

Readers take no lock: a rename replaces the old version. A lock file next to it serializes writers.
A new version is on disk before it gets its name, so that a crash leaves the old or the new version.
An unreadable file is set aside, never overwritten, and rebuilt from its owner's other data.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from catalog.atomic import write_atomically
from catalog.errors import CatalogUnusable

T = TypeVar("T")
LOCK_WAIT_S = 10.0
_LOOK_S = 0.02


def now_ms() -> int:
    """The current time in Unix milliseconds."""
    return time.time_ns() // 1_000_000


class SharedFile(Generic[T]):
    """One file with one value of type ``kind``. ``rebuild`` makes the value if none can be read.

    Every method raises ``CatalogUnusable`` if the file system refuses.
    """

    def __init__(self, path: Path, kind: type[T], rebuild: Callable[[], T]) -> None:
        self.path = path
        self._decoder = msgspec.json.Decoder(kind)
        self._rebuild = rebuild

    def read(self) -> T:
        """The current value; writes only if the file is damaged."""
        found = self._load()
        if found is not None:
            return found
        if not self.path.exists():
            return self._rebuild()
        with self.editing() as (value, _):
            return value

    @contextmanager
    def editing(self) -> Iterator[tuple[T, Callable[[T], None]]]:
        """The value under the lock, and the function that writes the next one."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with self._locked():
                value = self._load()
                if value is None:
                    self._set_aside()
                    value = self._rebuild()
                    self._write(value)
                yield value, self._write
        except OSError as error:
            raise CatalogUnusable(
                f"cannot write {self.path}: {error.strerror or error}; make room and its folder"
                " writable, or choose another one with TIDEGATE_HOME"
            ) from error

    def _load(self) -> T | None:
        """The value in the file; None if there is no file or its content is invalid."""
        try:
            return self._decoder.decode(self.path.read_bytes())
        except (FileNotFoundError, msgspec.MsgspecError, UnicodeDecodeError):
            return None
        except OSError as error:
            raise CatalogUnusable(
                f"cannot read {self.path}: {error.strerror or error}; make it readable, or choose"
                " another folder with TIDEGATE_HOME"
            ) from error

    def _set_aside(self) -> None:
        with suppress(FileNotFoundError):
            damaged = f"{self.path.name}.damaged-{time.time_ns()}"
            self.path.rename(self.path.with_name(damaged))

    def _write(self, value: T) -> None:
        write_atomically(self.path, msgspec.json.format(msgspec.json.encode(value), indent=1))

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
