"""The folder of files and batches: each has a record, and a file also its data, in frames.

Everything here blocks, and is called on one thread. ``OSError`` is raised where the disk fails, and
where the folder is at its bound.
"""

import errno
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from catalog.atomic import UNFINISHED, write_atomically
from orchestrator.batches.config import BatchConfig
from orchestrator.batches.frames import FrameWriter, read_frames
from orchestrator.batches.records import StoredBatch, StoredFile
from orchestrator.telemetry.log import fields, service_log

_RECORD, _DATA = ".record", ".data"
FILE_PREFIX = "file-"
_OUTCOMES_SHARE = 0.1
"""Share (0 to 1) of the folder's bound that uploads leave to the outcomes of batches."""

R = TypeVar("R", StoredFile, StoredBatch)


class Contents(NamedTuple):
    """The records that an earlier process left."""

    files: dict[str, StoredFile]
    batches: dict[str, StoredBatch]


class Folder:
    """The folder on the disk. ``open`` it before anything else."""

    def __init__(self, config: BatchConfig) -> None:
        self.path = config.folder
        self.used_bytes = 0
        """Bytes of all data; records are not counted, as they are small and few."""
        self._bound = config.folder_bytes

    def open(self) -> Contents:
        """Read all records, and remove the data that belongs to none of them."""
        contents = Contents({}, {})
        if not self.path.exists():
            return contents
        for path in self.path.glob(f"*{_RECORD}{UNFINISHED}"):  # a record that was cut short
            path.unlink()
        for path in sorted(self.path.glob(f"*{_RECORD}")):
            name = path.stem
            if name.startswith(FILE_PREFIX):
                self._load(path, StoredFile, contents.files)
            else:
                self._load(path, StoredBatch, contents.batches)
        wanted = set(contents.files)
        for batch in contents.batches.values():
            wanted |= {batch.input_id, batch.output_id, batch.errors_id}
        for path in self.path.glob(f"*{_DATA}"):
            # An unreadable record still exists, and its data belongs to it.
            if path.stem in wanted or path.with_suffix(_RECORD).exists():
                self.used_bytes += path.stat().st_size
            else:  # an upload that was cut short
                path.unlink()
        return contents

    def save(self, record: StoredFile | StoredBatch) -> None:
        """Write a record to the disk, in place of the previous one."""
        self._make()
        write_atomically(self.path / f"{record.id}{_RECORD}", msgspec.json.encode(record))

    def remove(self, name: str) -> None:
        """Remove a file or a batch. Idempotent."""
        with suppress(FileNotFoundError):
            (self.path / f"{name}{_RECORD}").unlink()
        data = self.data(name)
        with suppress(FileNotFoundError):
            size = data.stat().st_size
            data.unlink()
            self.used_bytes -= size

    def data(self, name: str) -> Path:
        return self.path / f"{name}{_DATA}"

    def writer(self, name: str, end: int = 0) -> "Appender":
        """A writer that appends to a file's data, from byte ``end`` on."""
        self._make()
        return Appender(self, name, end)

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield the content of a file in pieces."""
        for frame in read_frames(self.data(name)):
            yield frame.payload

    def require_room(self, size: int, *, is_upload: bool) -> None:
        """Raise ``OSError`` if ``size`` more bytes are above the bound."""
        bound = self._bound * (1 - _OUTCOMES_SHARE if is_upload else 1)
        if self.used_bytes + size > bound:
            raise OSError(
                errno.EDQUOT,
                "the folder of batches is at its bound (TIDEGATE_BATCHES__FOLDER_BYTES)",
            )

    def _make(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)

    def _load(self, path: Path, kind: type[R], into: dict[str, R]) -> None:
        try:
            into[path.stem] = msgspec.json.decode(path.read_bytes(), type=kind)
        except (msgspec.DecodeError, OSError):
            service_log.exception(
                "a file or batch cannot be read; it is left where it is",
                extra=fields(record=str(path)),
            )


class Appender:
    """One file's writer. Its caller must ask ``Folder.require_room`` first."""

    def __init__(self, folder: Folder, name: str, end: int) -> None:
        path = folder.data(name)
        before = os.stat(path).st_size if path.exists() else 0
        self._folder = folder
        self._writer = FrameWriter(path, end=end)
        folder.used_bytes += end - before

    def append(self, number: int, kind: int, payload: bytes) -> None:
        self._folder.used_bytes += self._writer.append(number, kind, payload)

    def sync(self) -> None:
        self._writer.sync()

    def close(self) -> None:
        self._writer.close()
