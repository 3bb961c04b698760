"""Append-only files of numbered frames. Appended frames survive a kill; a torn end is cut off.

::

    length(4) checksum(4) number(4) kind(1) payload(length)

The checksum (CRC-32) covers everything after it."""

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from catalog.atomic import write_all

_SUMMED = struct.Struct("<IB")
_HEAD = struct.Struct("<II")
_HEAD_BYTES = _HEAD.size + _SUMMED.size
_BUFFER_BYTES = 2**18


class Frame(NamedTuple):
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


def read_frames(path: Path) -> Iterator[Frame]:
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
            yield Frame(number, kind, payload, end)
            at = end
