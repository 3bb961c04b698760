"""Looks tasks up in the journal, on a thread of its own: it never waits for what is written."""

import asyncio
import os
import sqlite3
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from orchestrator.errors import JournalUnavailable
from orchestrator.tasks.journal.file import JournalFile, connect
from orchestrator.tasks.journal.records import COLUMNS, StoredResult, TaskRow

_LOOK = (
    f"SELECT {', '.join(f't.{name}' for name in COLUMNS)}, r.body FROM tasks t "
    "LEFT JOIN results r ON r.n = t.n"
)


@dataclass(frozen=True, slots=True)
class Found:
    """A task in the journal; ``result`` is None while it lives, and once that is removed."""

    row: TaskRow
    result: StoredResult | None


class JournalReader:
    """Reads the file that has the journal's name."""

    def __init__(self, file: JournalFile) -> None:
        self._file = file
        self._db: sqlite3.Connection | None = None
        self._inode = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tidegate-journal-read")

    async def find(self, task_id: str) -> Found | None:
        """A task by its id, of this process or an earlier one. Raises ``JournalUnavailable``."""
        return await self._ask("t.id = ?", (task_id,))

    async def find_submission(self, key: str, idempotency_key: str) -> Found | None:
        """A task by what its client called its submission. Raises ``JournalUnavailable``."""
        return await self._ask("t.key = ? AND t.idempotency_key = ?", (key, idempotency_key))

    def close(self) -> None:
        """Waits for a look-up that is under way."""
        self._thread.submit(self._close_db)
        self._thread.shutdown(wait=True)

    async def _ask(self, where: str, values: tuple[str, ...]) -> Found | None:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._look, where, values)
        except (sqlite3.Error, OSError) as error:
            raise JournalUnavailable(f"the journal cannot be read: {error}") from None

    # ── the thread ───────────────────────────────────────────────────────────────────────────

    def _look(self, where: str, values: tuple[str, ...]) -> Found | None:
        try:
            found = self._connection().execute(f"{_LOOK} WHERE {where}", values).fetchone()
        except sqlite3.Error:
            self._close_db()
            raise
        if found is None:
            return None
        *columns, body = found
        row = TaskRow(*columns)
        if body is None:
            return Found(row, None)
        blob = self._file.sealer.open(body, f"result {row.n}")
        return Found(row, msgspec.msgpack.decode(blob, type=StoredResult))

    def _connection(self) -> sqlite3.Connection:
        inode = os.stat(self._file.config.path).st_ino
        if self._db is None or inode != self._inode:
            self._close_db()
            self._db, self._inode = connect(self._file.config), inode
        return self._db

    def _close_db(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()
