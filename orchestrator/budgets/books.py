"""The books: what was spent on each outcome, by month, key, run and model.

Kept in a SQLite file next to the journal, or in memory where there is no journal. The entries of a
second are written together: a process that is killed loses at most those.
"""

import asyncio
import sqlite3
import threading
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

_TABLE = """
CREATE TABLE IF NOT EXISTS spent (
  month TEXT, key TEXT, run TEXT, model TEXT, outcome TEXT, requests INTEGER, prompt_tokens INTEGER,
  cached_tokens INTEGER, completion_tokens INTEGER, cost REAL,
  PRIMARY KEY (month, key, run, model, outcome)) WITHOUT ROWID
"""
_ADD = """
INSERT INTO spent VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
  requests = requests + excluded.requests,
  prompt_tokens = prompt_tokens + excluded.prompt_tokens,
  cached_tokens = cached_tokens + excluded.cached_tokens,
  completion_tokens = completion_tokens + excluded.completion_tokens, cost = cost + excluded.cost
"""
_SUMS = "sum(requests), sum(prompt_tokens), sum(cached_tokens), sum(completion_tokens), sum(cost)"


class BookEntry(NamedTuple):
    """Where an amount is entered."""

    month: str
    key: str
    """Fingerprint of the key."""
    run: str
    """Session or trace of the request; empty for none."""
    model: str
    outcome: str


class Amount(NamedTuple):
    requests: int = 0
    prompt_tokens: int = 0
    """Prompt tokens, those from a cache included."""
    cached_tokens: int = 0
    completion_tokens: int = 0
    cost: float = 0.0

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.completion_tokens

    def plus(self, other: "Amount") -> "Amount":
        return Amount._make(a + b for a, b in zip(self, other, strict=True))

    def minus(self, other: "Amount") -> "Amount":
        return Amount._make(a - b for a, b in zip(self, other, strict=True))


def month_of(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).strftime("%Y-%m")


def month_ends(unix: float) -> float:
    """When the month of a moment ends; both in seconds since 1970."""
    at = datetime.fromtimestamp(unix, UTC)
    year, month = at.year + at.month // 12, at.month % 12 + 1
    return datetime(year, month, 1, tzinfo=UTC).timestamp()


class Books:
    """All amounts of this month and the last. Several processes may have the same file: each knows
    what the others have spent as of its last ``flush``."""

    def __init__(self, path: Path | None, unix: float) -> None:
        """``unix`` is the time, in seconds since 1970. To be opened before anything else."""
        self._path = path
        self._unix = unix
        self._lock = threading.Lock()
        self._flushing = asyncio.Lock()
        self._new: dict[BookEntry, Amount] = {}
        """What is not in the file yet."""
        self._of_new: dict[tuple[str, str], Amount] = {}
        self._written: dict[tuple[str, str], Amount] = {}
        """What the file has, by month and key."""
        self.is_open = False

    async def open(self) -> None:
        """Raises ``sqlite3.Error`` or ``OSError``."""
        self._written = await asyncio.to_thread(self._open)
        self.is_open = True

    def _open(self) -> dict[tuple[str, str], Amount]:
        path, first = self._path, datetime.fromtimestamp(self._unix, UTC).replace(day=1)
        if path is not None:
            path.touch(mode=0o600)
        self._file = sqlite3.connect(path or ":memory:", check_same_thread=False)
        self._file.execute("PRAGMA journal_mode = WAL")
        with self._file:
            self._file.execute(_TABLE)
            before = month_of(first.timestamp() - 86_400)
            self._file.execute("DELETE FROM spent WHERE month < ?", (before,))
        return self._sums()

    def _sums(self) -> dict[tuple[str, str], Amount]:
        query = f"SELECT month, key, {_SUMS} FROM spent GROUP BY month, key"
        return {(month, key): Amount(*sums) for month, key, *sums in self._file.execute(query)}

    def enter(self, entry: BookEntry, amount: Amount) -> None:
        whose = entry.month, entry.key
        self._new[entry] = self._new.get(entry, Amount()).plus(amount)
        self._of_new[whose] = self._of_new.get(whose, Amount()).plus(amount)

    def spent(self, month: str, key: str) -> Amount:
        """All that a key has spent in a month."""
        written = self._written.get((month, key), Amount())
        return written.plus(self._of_new.get((month, key), Amount()))

    @property
    def has_new(self) -> bool:
        return bool(self._new)

    async def flush(self) -> None:
        """Write what was entered. What cannot be written is kept, and tried again next time. Raises
        ``sqlite3.Error``."""
        async with self._flushing:
            new = dict(self._new)
            sums = await asyncio.to_thread(self._write, new)
            left = [
                (entry, self._new[entry].minus(new.get(entry, Amount()))) for entry in self._new
            ]
            self._new, self._of_new, self._written = {}, {}, sums
            for entry, amount in left:
                if amount.requests:
                    self.enter(entry, amount)

    def _write(self, new: Mapping[BookEntry, Amount]) -> dict[tuple[str, str], Amount]:
        with self._lock, self._file:
            self._file.executemany(_ADD, [(*entry, *amount) for entry, amount in new.items()])
            return self._sums()

    async def read(self, month: str, key: str | None, by: Iterable[str]) -> list[dict[str, object]]:
        """Sums of a month, of one key or of all (None), by some columns of ``BookEntry``, in its
        order."""
        await self.flush()
        return await asyncio.to_thread(self._read, month, key, by)

    def _read(self, month: str, key: str | None, by: Iterable[str]) -> list[dict[str, object]]:
        columns = ", ".join(by)
        where = "" if key is None else " AND key = ?"
        query = f"SELECT {columns}, {_SUMS} FROM spent WHERE month = ?{where} GROUP BY {columns}"
        names = (*columns.split(", "), *Amount._fields)
        with self._lock:
            rows = self._file.execute(query, (month,) if key is None else (month, key)).fetchall()
        return [dict(zip(names, row, strict=True)) for row in rows]

    async def close(self) -> None:
        """Write what is left, and close the file. Idempotent."""
        if not self.is_open:
            return
        self.is_open = False
        try:
            await self.flush()
        finally:
            self._file.close()
