"""Looks tasks up in the journal, on a thread of its own, so that it never waits for writes."""

import asyncio
import os
import queue
import sqlite3
import threading
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec

from orchestrator.errors import JournalUnavailable
from orchestrator.tasks.journal.file import JournalFile, connect, told
from orchestrator.tasks.journal.records import COLUMNS, StoredResult, TaskRow
from orchestrator.tasks.journal.sealing import WrongKey
from orchestrator.telemetry.log import fields, service_log

_LOOK = (
    f"SELECT {', '.join(f't.{name}' for name in COLUMNS)}, r.body FROM tasks t "
    "LEFT JOIN results r ON r.n = t.n"
)


READ_WAIT_S = 5.0
"""Longest wait for the disk, in seconds; a slower disk is as good as broken."""
CLOSE_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Found:
    """A task in the journal; ``result`` is None while it lives, and once the result is removed."""

    row: TaskRow
    result: StoredResult | None


_Question = tuple[Future[Found | None], str, tuple[str, ...]]


class JournalReader:
    """Reads the file that has the journal's name."""

    def __init__(self, file: JournalFile) -> None:
        self._file = file
        self._db: sqlite3.Connection | None = None
        self._inode = 0
        self._inbox: queue.SimpleQueue[_Question | None] = queue.SimpleQueue()
        # A daemon, because a thread that hangs on its disk must not keep the process.
        self._thread = threading.Thread(target=self._run, name="tidegate-journal-read", daemon=True)
        self._is_closed = False

    async def find(self, task_id: str) -> Found | None:
        """A task by its id, of this process or an earlier one. Raises ``JournalUnavailable``."""
        return await self._ask("t.id = ?", (task_id,))

    async def find_submission(self, key: str, idempotency_key: str) -> Found | None:
        """A task by its client's name for the submission. Raises ``JournalUnavailable``."""
        return await self._ask("t.key = ? AND t.idempotency_key = ?", (key, idempotency_key))

    def close(self) -> None:
        """End the thread; waits a moment for a look-up in progress."""
        self._is_closed = True
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(CLOSE_WAIT_S)

    async def _ask(self, where: str, values: tuple[str, ...]) -> Found | None:
        if self._is_closed:
            raise JournalUnavailable("the journal cannot be read: the service is going down")
        if not self._thread.is_alive():
            self._thread.start()
        answer: Future[Found | None] = Future()
        self._inbox.put((answer, where, values))
        try:
            async with asyncio.timeout(READ_WAIT_S):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            raise JournalUnavailable(
                f"the journal cannot be read: the disk has not answered within {READ_WAIT_S:g} s"
            ) from None
        except (sqlite3.Error, OSError) as error:
            raise JournalUnavailable(
                f"the journal cannot be read: {told(error, self._file.config.path)}"
            ) from None

    # ── the thread ───────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while (question := self._inbox.get()) is not None:
            answer, where, values = question
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(self._look(where, values))
            except BaseException as error:
                answer.set_exception(error)
        self._close_db()

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
        try:
            blob = self._file.sealer.open(body, f"result {row.n}")
            return Found(row, msgspec.msgpack.decode(blob, type=StoredResult))
        except (msgspec.DecodeError, WrongKey):
            service_log.exception("a result in the journal cannot be read", extra=fields(row=row.n))
            return Found(row, None)

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
