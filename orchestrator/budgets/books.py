"""The books: spending on each outcome, by month, key, run and model.

Stored in a SQLite file next to the journal, or in memory without a journal. The entries of each
second are written together, so a killed process loses at most one second.

Orchestrators that share a store also have common books there. Each file has its own lines with its
current sums. So a line that is written twice counts once, an emptied store gets all lines again,
and the spending of a dead orchestrator stays.
"""

import asyncio
import sqlite3
import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from orchestrator.errors import NotReady
from orchestrator.sharing import Lines, Sharing

_encoded = msgspec.json.encode


class BookEntry(NamedTuple):
    """The columns under which an amount is entered."""

    month: str
    key: str
    run: str
    """Session or trace of the request; empty for none."""
    model: str
    outcome: str


class Amount(NamedTuple):
    requests: int = 0
    prompt_tokens: int = 0
    """Prompt tokens, including cached ones."""
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def plus(self, other: "Amount") -> "Amount":
        return Amount._make(a + b for a, b in zip(self, other, strict=True))


_AMOUNTS = (
    "requests INTEGER, prompt_tokens INTEGER, cached_tokens INTEGER, completion_tokens INTEGER,"
    " cost REAL"
)
_TABLES = (
    f"CREATE TABLE IF NOT EXISTS spent (month TEXT, key TEXT, run TEXT, model TEXT, outcome TEXT,"
    f" {_AMOUNTS}, PRIMARY KEY (month, key, run, model, outcome)) WITHOUT ROWID",
    f"CREATE TABLE IF NOT EXISTS by_key (month TEXT, key TEXT, {_AMOUNTS},"
    " PRIMARY KEY (month, key)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS file AS SELECT hex(randomblob(8)) AS id",
)
_SUMS = ", ".join(f"sum({name})" for name in Amount._fields)
_MERGE = "ON CONFLICT DO UPDATE SET " + ", ".join(
    f"{name} = {name} + excluded.{name}" for name in Amount._fields
)
_ADD = f"INSERT INTO spent VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) {_MERGE} RETURNING *"
_ADD_TO_KEY = f"INSERT INTO by_key VALUES (?, ?, ?, ?, ?, ?, ?) {_MERGE}"

_Sums = dict[tuple[str, str], Amount]
"""Amounts by month and key."""


class _Unwritten:
    """Entries that are not yet in the file, and their sums."""

    def __init__(self) -> None:
        self.entries = defaultdict[BookEntry, Amount](Amount)
        self.by_key = defaultdict[tuple[str, str], Amount](Amount)

    def add(self, entry: BookEntry, amount: Amount) -> None:
        self.entries[entry] = self.entries[entry].plus(amount)
        self.by_key[entry[:2]] = self.by_key[entry[:2]].plus(amount)


def month_of(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m")


def month_ends(unix: float) -> float:
    """End of the month of ``unix``. Both are in seconds since 1970."""
    at = datetime.fromtimestamp(unix, UTC)
    year, month = at.year + at.month // 12, at.month % 12 + 1
    return datetime(year, month, 1, tzinfo=UTC).timestamp()


class Books:
    """All amounts of this month and the last. Several processes may use the same file. Each knows
    the others' spending up to its own last ``flush``."""

    def __init__(self, path: Path | None, unix: float, sharing: Sharing) -> None:
        """``unix`` is the time in seconds since 1970. Call ``open`` first."""
        self._path = path
        self._unix = unix
        self._sharing = sharing
        self._telling = asyncio.Lock()
        self._untold: Lines = {}
        """Lines of the common books that changed here and are not yet written there."""
        self._all_untold = True
        self._lock = threading.Lock()
        self._flushing = asyncio.Lock()
        self._new = _Unwritten()
        self._being_written = _Unwritten()
        self._written: _Sums = {}
        self.is_open = False

    async def open(self) -> None:
        """Open the file. Raises ``sqlite3.Error`` or ``OSError``."""
        self._written = await asyncio.to_thread(self._open)
        self.is_open = True

    def _open(self) -> _Sums:
        path, first = self._path, datetime.fromtimestamp(self._unix, UTC).replace(day=1)
        if path is not None:
            path.touch(mode=0o600)
        self._file = sqlite3.connect(path or ":memory:", check_same_thread=False)
        self._file.execute("PRAGMA journal_mode = WAL")
        with self._file:
            for table in _TABLES:
                self._file.execute(table)
            ((self._id,),) = self._file.execute("SELECT id FROM file")
            before = month_of(first.timestamp() - 86_400)
            for table in ("spent", "by_key"):
                self._file.execute(f"DELETE FROM {table} WHERE month < ?", (before,))
        return self._sums()

    def _sums(self) -> _Sums:
        rows = self._file.execute("SELECT * FROM by_key")
        return {(month, key): Amount(*sums) for month, key, *sums in rows}

    def enter(self, entry: BookEntry, amount: Amount) -> None:
        self._new.add(entry, amount)

    def spent(self, month: str, key: str) -> Amount:
        parts = self._written, self._being_written.by_key, self._new.by_key
        first, second, third = (part.get((month, key), Amount()) for part in parts)
        return first.plus(second).plus(third)

    @property
    def has_new(self) -> bool:
        return bool(self._new.entries)

    @property
    def has_untold(self) -> bool:
        return self._sharing.is_shared and bool(self._untold or self._all_untold)

    async def flush(self) -> None:
        """Write the new entries. Entries that cannot be written are kept for the next try. Raises
        ``sqlite3.Error``."""
        async with self._flushing:
            self._being_written, self._new = self._new, _Unwritten()
            try:
                sums, lines = await asyncio.to_thread(self._write, self._being_written)
            except BaseException:
                for entry, amount in self._new.entries.items():
                    self._being_written.add(entry, amount)
                self._new, self._being_written = self._being_written, _Unwritten()
                raise
            self._written, self._being_written = sums, _Unwritten()
            self._untold |= lines

    def _write(self, new: _Unwritten) -> tuple[_Sums, Lines]:
        with self._lock, self._file:
            added = [(*entry, *amount) for entry, amount in new.entries.items()]
            rows = [self._file.execute(_ADD, each).fetchone() for each in added]
            of_keys = [(*whose, *amount) for whose, amount in new.by_key.items()]
            self._file.executemany(_ADD_TO_KEY, of_keys)
            return self._sums(), self._lines(rows) if self._sharing.is_shared else {}

    def _lines(self, rows: Iterable[Sequence[Any]]) -> Lines:
        """Lines of the common books from rows of the file: one page for the keys of a month, and
        one page for each key."""
        lines: Lines = {}
        for month, key, *where in rows:
            lines[month, key] = b"[1]"
            name = _encoded([self._id, *where[:3]]).decode()
            lines[f"{month} {key}", name] = _encoded(where[3:])
        return lines

    def tell_all(self) -> None:
        """Write all lines to the common books again: the store may have lost some."""
        self._all_untold = True

    async def tell(self) -> None:
        """Write the changed lines to the common books, if there are any. Raises ``NotReady`` if the
        books are unreachable; all lines are then written later."""
        async with self._telling:
            lines, self._untold = self._untold, {}
            is_all, self._all_untold = self._all_untold, False
            try:
                if is_all and not self._sharing.fault:
                    lines = await asyncio.to_thread(self._all_lines)
                await self._sharing.write_lines(lines)
            except BaseException:
                self._all_untold = True
                raise

    def _all_lines(self) -> Lines:
        with self._lock:
            return self._lines(self._file.execute("SELECT * FROM spent"))

    async def read(
        self, month: str, key: str | None, by: Sequence[str]
    ) -> tuple[list[dict[str, Any]], str]:
        """Sums of a month for one key (None: all), by some columns of ``BookEntry`` in its order;
        and the reason that other orchestrators' spending is missing, empty if it is not."""
        await asyncio.shield(self.flush())  # the reader may disconnect
        fault = ""
        if self._sharing.is_shared:
            try:
                await self.tell()
                read = self._sharing.read_lines
                keys = await read(month) if key is None else [key]
                pages = {each: await read(f"{month} {each}") for each in keys}
                return await asyncio.to_thread(_summed, pages, by), ""
            except NotReady as error:
                fault = error.message
        return await asyncio.to_thread(self._read, month, key, by), fault

    def _read(self, month: str, key: str | None, by: Iterable[str]) -> list[dict[str, Any]]:
        columns = ", ".join(by)
        where = "" if key is None else " AND key = ?"
        query = f"SELECT {columns}, {_SUMS} FROM spent WHERE month = ?{where} GROUP BY {columns}"
        names = (*columns.split(", "), *Amount._fields)
        with self._lock:
            rows = self._file.execute(query, (month,) if key is None else (month, key)).fetchall()
        return [dict(zip(names, row, strict=True)) for row in rows]

    async def close(self) -> None:
        """Write the remaining entries and close the file. Idempotent."""
        if not self.is_open:
            return
        self.is_open = False
        try:
            await self.flush()
            with suppress(NotReady):
                await self.tell()
        finally:
            self._file.close()


def _summed(pages: Mapping[str, Mapping[str, bytes]], by: Sequence[str]) -> list[dict[str, Any]]:
    """Sums by some columns of a month's lines in the common books. ``pages`` are by key."""
    sums = defaultdict[tuple[str, ...], Amount](Amount)
    for key, lines in pages.items():
        for name, told in lines.items():
            _, *where = msgspec.json.decode(name, type=list[str])
            entry = BookEntry("", key, *where)
            at = tuple(getattr(entry, column) for column in by)
            sums[at] = sums[at].plus(Amount._make(msgspec.json.decode(told)))
    return [dict(zip(by, at, strict=True)) | sums[at]._asdict() for at in sorted(sums)]
