"""The folder of files and batches: each has a record, and a file also its data, in frames::

    length(4) checksum(4) number(4) kind(1) payload(length)

The checksum (CRC-32) covers everything after it. Appended frames survive a kill; a torn end is cut
off.

Everything here blocks, and is called on one thread. ``OSError`` is raised where the disk fails, and
where the folder is at its bound.

The process that has the journal's locks has the folder. The kernel holds these for a process for as
long as it lives, stopped or not (flock(2)): no two ever write there, and another one can continue
once it has ended. A line of a batch is done once its outcome is in one of the batch's two files
(``Ledger``), so that no kill loses or doubles one.
"""

import asyncio
import errno
import os
import secrets
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from catalog.atomic import UNFINISHED, write_all, write_atomically
from orchestrator.batches.config import BatchConfig
from orchestrator.batches.records import LineOutcome, StoredBatch, StoredFile
from orchestrator.fair_share import is_over_share
from orchestrator.tasks.journal.file import (
    JournalConfig,
    JournalError,
    JournalFile,
    JournalHeld,
    open_journal,
)
from orchestrator.telemetry.log import fields, service_log

_RECORD, _DATA = ".record", ".data"
FILE_PREFIX = "file-"
_OUTCOMES_SHARE = 0.1
"""Share (0 to 1) of the folder's bound that uploads leave to the outcomes of batches."""

R = TypeVar("R", StoredFile, StoredBatch)

_SUMMED = struct.Struct("<IB")
_HEAD = struct.Struct("<II")
_HEAD_BYTES = _HEAD.size + _SUMMED.size
_BUFFER_BYTES = 2**18


class FileFrame(NamedTuple):
    """One frame. ``number`` and ``kind`` have the meaning that the file's writer gives them."""

    number: int
    kind: int
    payload: bytes
    end: int
    """Offset of the next frame, in bytes."""


class FrameWriter:
    """Appends to one file, made if missing. Blocks; every method may raise ``OSError``."""

    def __init__(self, path: Path, *, end: int = 0) -> None:
        """Continue at byte ``end``; cut off anything after it."""
        self.end = end
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            os.ftruncate(self._file, end)
        except OSError:
            self.close()
            raise

    def append(self, number: int, kind: int, payload: bytes) -> int:
        """Append a whole frame, or nothing of it; returns its size in bytes."""
        summed = _SUMMED.pack(number, kind)
        checksum = zlib.crc32(payload, zlib.crc32(summed))
        frame = _HEAD.pack(len(payload), checksum) + summed + payload
        os.lseek(self._file, self.end, os.SEEK_SET)
        try:
            write_all(self._file, frame)
        except OSError:
            os.ftruncate(self._file, self.end)
            raise
        self.end += len(frame)
        return len(frame)

    def sync(self) -> None:
        """Flush the file to the disk. One that is closed has been flushed."""
        if self._file >= 0:
            os.fsync(self._file)

    def close(self) -> None:
        """Close the file. Idempotent."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)


def read_frames(path: Path) -> Iterator[FileFrame]:
    """Yield all frames up to the first that is not whole. Blocks. Raises ``OSError``."""
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
    """A new id that cannot be guessed."""
    return f"{prefix}{secrets.token_hex(16)}"


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
        self._owners: dict[str, str] = {}
        """Owners of the data, by file."""
        self._bytes_of: Counter[str] = Counter()
        """Bytes of each owner's data."""

    def open(self) -> Contents:
        """Read all records, and remove data that belongs to none."""
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
        self._owners = {file.id: file.owner for file in contents.files.values()}
        for batch in contents.batches.values():
            names = (batch.input_id, batch.output_id, batch.errors_id)
            self._owners |= dict.fromkeys(names, batch.owner)
        for path in self.path.glob(f"*{_DATA}"):
            # An unreadable record still exists, and its data belongs to it.
            if path.stem in self._owners or path.with_suffix(_RECORD).exists():
                self.count(path.stem, path.stat().st_size)
            else:  # an upload that was cut short
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
        """A writer that appends to the data of an owner's file, from byte ``end`` on."""
        self._make()
        self._owners[name] = owner
        return Appender(self, name, end)

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield the content of a file in pieces."""
        for frame in read_frames(self.data(name)):
            yield frame.payload

    def count(self, name: str, more: int) -> None:
        """Count ``more`` bytes of a file's data."""
        self.used_bytes += more
        self._bytes_of[self._owners.get(name, "")] += more

    def require_room(self, owner: str, size: int, *, is_upload: bool) -> None:
        """Raise ``OSError`` if ``size`` more bytes are above the bound, or the owner's share."""
        left = self._bound * (1 - _OUTCOMES_SHARE if is_upload else 1) - self.used_bytes
        if size > left:
            raise OSError(
                errno.EDQUOT,
                "the folder of batches is at its bound (TIDEGATE_BATCHES__FOLDER_BYTES)",
            )
        if is_over_share(self._bytes_of[owner], size, left):
            raise OSError(
                errno.EDQUOT,
                f"this key's files take {self._bytes_of[owner]} bytes, its share of the folder of "
                "batches (TIDEGATE_BATCHES__FOLDER_BYTES): delete some",
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
        self._name = name
        self._writer = FrameWriter(path, end=end)
        folder.count(name, end - before)

    def append(self, number: int, kind: int, payload: bytes) -> None:
        self._folder.count(self._name, self._writer.append(number, kind, payload))

    def sync(self) -> None:
        self._writer.sync()

    def close(self) -> None:
        self._writer.close()


class Ledger:
    """The outcomes of one batch: open, put entries, close. Raises ``OSError``."""

    def __init__(self, folder: Folder, batch: StoredBatch) -> None:
        """Read an earlier process's entries, without a torn one."""
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
        except BaseException:  # it is tried again for as long as the disk is full
            for writer in self._writers.values():
                writer.close()
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
        """Write the outcome of a line, once. Entries of expired or cancelled lines are short, and
        are written even beyond the folder's bound."""
        batch = self._batch
        if kind in (LineOutcome.SUCCEEDED, LineOutcome.ERRORED):
            self._folder.require_room(batch.owner, len(entry), is_upload=False)
        assert not self.is_done(number), f"line {number} would have two entries"
        name = batch.output_id if kind is LineOutcome.SUCCEEDED else batch.errors_id
        self._writers[name].append(number, kind, entry)
        self._mark(number, kind, name, len(entry))

    def close(self) -> None:
        """Flush and close the files. Where that fails it may be called again."""
        for writer in self._writers.values():
            writer.sync()
            writer.close()

    def _mark(self, number: int, kind: LineOutcome, name: str, size: int) -> None:
        if number >= len(self._done):
            self._done.extend(bytes(number + 1 - len(self._done)))
        self._done[number] = 1
        self.counts[kind] += 1
        self.bytes[name] += size


TRY_EVERY_S = 0.5
"""Time between two tries to have the folder, in seconds."""


def folder_of(journal: Path) -> Path:
    return Path(f"{journal}.batches")


class Claim:
    """One process's claim to the folder next to a journal."""

    def __init__(
        self, config: JournalConfig, file: JournalFile | None, on_granted: Callable[[], None]
    ) -> None:
        """``file`` is the journal, where this process has it already."""
        self._config = config
        self._file = file
        self._on_granted = on_granted

    async def granted(self) -> Path:
        """Wait until the folder is this process's, which it stays; returns its path."""
        was_told = False
        while self._file is None:
            await asyncio.sleep(TRY_EVERY_S)
            try:
                self._file = await asyncio.to_thread(open_journal, self._config)
            except JournalHeld:
                continue
            except JournalError as error:
                if not was_told:
                    service_log.warning("no files and batches for now; will retry: %s", error)
                was_told = True
                continue
            service_log.info("files and batches are kept by this process from now on")
        self._on_granted()
        return folder_of(self._file.config.path)  # behind any link to the journal

    def close(self) -> None:
        """Leave the folder to another process. Nothing may be written there any more."""
        if self._file is not None:
            self._file.close()
