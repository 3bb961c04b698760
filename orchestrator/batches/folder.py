"""The folder of files and batches. Each has a record. A file also has its data, in frames::

    length(4) checksum(4) number(4) kind(1) payload(length)

The checksum (CRC-32) covers everything after it. Appended frames survive a kill. An incomplete
frame at the end is truncated.

All functions block and are called on one thread. They raise ``OSError`` if the disk fails or the
folder is at its limit.

The process with the journal's locks owns the folder. The kernel keeps the locks while the process
lives, even if it is stopped (flock(2)): two processes never write at once, and another one can
continue after the owner ends. A line of a batch is done when its outcome is in one of the batch's
two files (``Ledger``), so that a kill never loses or duplicates an outcome.
"""

import errno
import os
import secrets
import struct
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from catalog.atomic import UNFINISHED, write_all, write_atomically
from orchestrator.batches.records import LineOutcome, StoredBatch, StoredFile
from orchestrator.batches.section import BatchConfig
from orchestrator.fair_share import is_over_share
from orchestrator.telemetry.log import fields, service_log

_RECORD, _DATA = ".record", ".data"
FILE_PREFIX = "file-"
_OUTCOMES_SHARE = 0.1
"""Share (0 to 1) of the folder's limit that is reserved for the outcomes of batches."""

_SUMMED = struct.Struct("<IB")
_HEAD = struct.Struct("<II")
_HEAD_BYTES = _HEAD.size + _SUMMED.size
_BUFFER_BYTES = 2**18


class FileFrame(NamedTuple):
    """One frame. The file's writer defines the meaning of ``number`` and ``kind``."""

    number: int
    kind: int
    payload: bytes
    end: int
    """Offset of the next frame, in bytes."""


def read_frames(path: Path) -> Iterator[FileFrame]:
    """Yield all frames before the first incomplete one. Blocks. Raises ``OSError``."""
    with open(path, "rb", buffering=_BUFFER_BYTES) as file:
        size, at = os.fstat(file.fileno()).st_size, 0
        while len(head := file.read(_HEAD_BYTES)) == _HEAD_BYTES:
            length, checksum = _HEAD.unpack_from(head)
            end = at + _HEAD_BYTES + length
            if end > size:
                return
            payload = file.read(length)
            summed = head[_HEAD.size :]
            if len(payload) < length or zlib.crc32(payload, zlib.crc32(summed)) != checksum:
                return
            number, kind = _SUMMED.unpack(summed)
            yield FileFrame(number, kind, payload, end)
            at = end


def new_id(prefix: str) -> str:
    """A new id that nobody can guess."""
    return f"{prefix}{secrets.token_hex(16)}"


class Contents(NamedTuple):
    """An earlier process's records by id."""

    files: dict[str, StoredFile]
    batches: dict[str, StoredBatch]


class Folder:
    """The folder on disk. Call ``open`` first."""

    def __init__(self, config: BatchConfig) -> None:
        self.path = config.folder
        self.used_bytes = 0
        """Bytes of all data, without records, which are small and few."""
        self._bound = config.folder_bytes
        self._owners: dict[str, str] = {}
        self._bytes_of: Counter[str] = Counter()

    def open(self) -> Contents:
        """Read all records, and remove data without a record."""
        contents = Contents({}, {})
        if not self.path.exists():
            return contents
        for path in self.path.glob(f"*{_RECORD}{UNFINISHED}"):  # an incomplete record
            path.unlink()
        for path in sorted(self.path.glob(f"*{_RECORD}")):
            try:
                body = path.read_bytes()
                if path.name.startswith(FILE_PREFIX):
                    contents.files[path.stem] = msgspec.json.decode(body, type=StoredFile)
                else:
                    contents.batches[path.stem] = msgspec.json.decode(body, type=StoredBatch)
            except (msgspec.DecodeError, OSError):
                service_log.exception(
                    "cannot read a file or batch; it stays in the folder",
                    extra=fields(record=str(path)),
                )
        self._owners = {file.id: file.owner for file in contents.files.values()}
        for batch in contents.batches.values():
            names = (batch.input_id, batch.output_id, batch.errors_id)
            self._owners |= dict.fromkeys(names, batch.owner)
        for path in self.path.glob(f"*{_DATA}"):
            # An unreadable record still counts: keep its data.
            if path.stem in self._owners or path.with_suffix(_RECORD).exists():
                self.count(path.stem, path.stat().st_size)
            else:  # an incomplete upload
                path.unlink()
        return contents

    def save(self, record: StoredFile | StoredBatch) -> None:
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
            self.count(name, -size)
        self._owners.pop(name, None)

    def data(self, name: str) -> Path:
        return self.path / f"{name}{_DATA}"

    def writer(self, name: str, owner: str, end: int = 0) -> "Appender":
        """A writer that appends to the data of an owner's file at byte ``end``."""
        self._make()
        self._owners[name] = owner
        return Appender(self, name, end)

    def pieces(self, name: str) -> Iterator[bytes]:
        for frame in read_frames(self.data(name)):
            yield frame.payload

    def count(self, name: str, more: int) -> None:
        self.used_bytes += more
        self._bytes_of[self._owners.get(name, "")] += more

    def require_room(self, owner: str, size: int, *, is_upload: bool) -> None:
        """Raise ``OSError`` if ``size`` more bytes exceed the limit or the owner's share."""
        left = self._bound * (1 - _OUTCOMES_SHARE if is_upload else 1) - self.used_bytes
        if size > left:
            raise OSError(
                errno.EDQUOT,
                "the folder of batches is full; its limit is TIDEGATE_BATCHES__FOLDER_BYTES",
            )
        if is_over_share(self._bytes_of[owner], size, left):
            raise OSError(
                errno.EDQUOT,
                f"this key's files take {self._bytes_of[owner]} bytes, its whole share of the "
                "folder of batches (TIDEGATE_BATCHES__FOLDER_BYTES); delete some",
            )

    def _make(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=True)


class Appender:
    """Appends frames to one file of a folder, which it creates if missing. The caller must call
    ``Folder.require_room`` first."""

    def __init__(self, folder: Folder, name: str, end: int) -> None:
        """Continue at byte ``end`` and truncate everything after it."""
        path = folder.data(name)
        before = path.stat().st_size if path.exists() else 0
        self._folder = folder
        self._name = name
        self._end = end
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(self._file, end)
        except OSError:
            os.close(self._file)
            raise
        folder.count(name, end - before)

    def append(self, number: int, kind: int, payload: bytes) -> None:
        """Append a whole frame or nothing."""
        summed = _SUMMED.pack(number, kind)
        checksum = zlib.crc32(payload, zlib.crc32(summed))
        frame = _HEAD.pack(len(payload), checksum) + summed + payload
        os.lseek(self._file, self._end, os.SEEK_SET)
        try:
            write_all(self._file, frame)
        except OSError:
            os.ftruncate(self._file, self._end)
            raise
        self._end += len(frame)
        self._folder.count(self._name, len(frame))

    def close(self, *, sync: bool = True) -> None:
        """Flush the file to disk if ``sync``, and close it. Idempotent."""
        if self._file >= 0:
            if sync:
                os.fsync(self._file)
            file, self._file = self._file, -1
            os.close(file)


class Ledger:
    """Writes the outcomes of one batch: open, put entries, close. Raises ``OSError``."""

    def __init__(self, folder: Folder, batch: StoredBatch) -> None:
        """Read the entries of an earlier process, without an incomplete one."""
        self.counts: Counter[LineOutcome] = Counter()
        self.bytes = dict.fromkeys((batch.output_id, batch.errors_id), 0)
        """Bytes of the entries, by file."""
        self._folder = folder
        self._batch = batch
        self._done = bytearray()
        self._writers: dict[str, Appender] = {}
        try:
            for name in self.bytes:
                end = self._read(folder, name)
                self._writers[name] = folder.writer(name, batch.owner, end)
        except BaseException:  # the caller retries while the disk is full
            for writer in self._writers.values():
                writer.close(sync=False)
            raise

    def _read(self, folder: Folder, name: str) -> int:
        end, path = 0, folder.data(name)
        if path.exists():
            for frame in read_frames(path):
                self._mark(frame.number, LineOutcome(frame.kind), name, len(frame.payload))
                end = frame.end
        return end

    def is_done(self, number: int) -> bool:
        return number < len(self._done) and bool(self._done[number])

    def put(self, number: int, kind: LineOutcome, entry: bytes) -> None:
        """Write the outcome of a line, once. Entries of expired or cancelled lines are short. They
        are written even above the folder's limit."""
        batch = self._batch
        if kind in (LineOutcome.SUCCEEDED, LineOutcome.ERRORED):
            self._folder.require_room(batch.owner, len(entry), is_upload=False)
        assert not self.is_done(number), f"line {number} would have two entries"
        name = batch.output_id if kind is LineOutcome.SUCCEEDED else batch.errors_id
        self._writers[name].append(number, kind, entry)
        self._mark(number, kind, name, len(entry))

    def close(self) -> None:
        """Flush and close the files. May be called again if this fails."""
        for writer in self._writers.values():
            writer.close()

    def _mark(self, number: int, kind: LineOutcome, name: str, size: int) -> None:
        if number >= len(self._done):
            self._done.extend(bytes(number + 1 - len(self._done)))
        self._done[number] = 1
        self.counts[kind] += 1
        self.bytes[name] += size


def folder_of(journal: Path) -> Path:
    return Path(f"{journal}.batches")
