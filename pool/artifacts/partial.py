"""A file that comes in parts, in any order, over any number of attempts.

    model.safetensors.part      the bytes, where they belong
    model.safetensors.ranges    a line ``begin end`` for everything that has been written

The second file is written after the first, so that after a kill it tells of no byte that was not
written. After a power cut it may; the digest of the whole finds that.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from catalog.atomic import write_all

NOTE_BYTES: Final = 4 * 2**20
"""Bytes after which a part on its way is noted: a kill costs no more of it."""

Range = tuple[int, int]


class PartialFile:
    """The parts so far of ``path``, which will have ``size`` bytes. Methods raise ``OSError``."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self.size = size
        self._part = path.with_name(path.name + ".part")
        self._ranges = path.with_name(path.name + ".ranges")
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._done = self._load()
        self._file = os.open(self._part, os.O_RDWR | os.O_CREAT, 0o600)
        self._notes = os.open(self._ranges, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    @property
    def done_bytes(self) -> int:
        return sum(end - begin for begin, end in self._done)

    def missing(self) -> list[Range]:
        """The ranges that are still to come, in order."""
        missing, at = [], 0
        for begin, end in [*self._done, (self.size, self.size)]:
            if begin > at:
                missing.append((at, begin))
            at = max(at, end)
        return missing

    def write(self, offset: int, data: bytes) -> None:
        """Put bytes where they belong; call ``note`` afterwards."""
        left = memoryview(data)
        while left:
            written = os.pwrite(self._file, left, offset)
            left, offset = left[written:], offset + written

    def note(self, begin: int, end: int) -> None:
        """Note that ``begin`` to ``end`` have been written."""
        if begin < end:
            _append(self._notes, f"{begin} {end}\n".encode())
            self._done = _merged([*self._done, (begin, end)])

    def restart(self) -> None:
        """Forget everything."""
        os.ftruncate(self._notes, 0)
        os.ftruncate(self._file, 0)
        self._done = []

    def finish(self) -> None:
        """Give the file its final name; every part must be there."""
        assert not self.missing(), "a file is finished before it is complete"
        os.ftruncate(self._file, self.size)
        os.fsync(self._file)
        os.replace(self._part, self.path)
        self._ranges.unlink(missing_ok=True)

    def close(self) -> None:
        for file in (self._file, self._notes):
            os.close(file)

    def _load(self) -> list[Range]:
        try:
            have = self._part.stat().st_size
            text = self._ranges.read_text()
            whole = text[: text.rfind("\n") + 1]
            if len(whole) < len(text):  # a full disk has cut the last line: none may go on there
                os.truncate(self._ranges, len(whole))
            lines = whole.splitlines()
            ranges = [(int(begin), int(end)) for begin, end in map(str.split, lines)]
        except FileNotFoundError:
            ranges, have = [], 0
        except ValueError:
            ranges, have = [], 0
        if any(not 0 <= begin < end <= min(have, self.size) for begin, end in ranges):
            ranges = []
        if not ranges:  # notes of another file, or none: they must not count for this one
            self._ranges.unlink(missing_ok=True)
        return _merged(ranges)


def split(ranges: list[Range], most: int) -> Iterator[Range]:
    """``ranges`` in pieces of at most ``most`` bytes."""
    for begin, end in ranges:
        for at in range(begin, end, most):
            yield at, min(end, at + most)


def _append(file: int, line: bytes) -> None:
    """Append all of ``line`` or nothing: the next line would go on after a part. Raises
    ``OSError``."""
    before = os.fstat(file).st_size
    try:
        write_all(file, line)
    except OSError:
        os.ftruncate(file, before)
        raise


def _merged(ranges: list[Range]) -> list[Range]:
    merged: list[Range] = []
    for begin, end in sorted(ranges):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged
