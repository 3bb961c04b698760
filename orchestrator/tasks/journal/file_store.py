"""Writes durable tasks to the journal's file and reads them (OR-5)."""

import os
import sqlite3
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter

import msgspec

from orchestrator.tasks.journal import store
from orchestrator.tasks.journal.file import (
    JournalError,
    JournalFile,
    connect,
    describe_error,
    inode_of,
    is_damage,
    prepare,
    set_aside,
)
from orchestrator.tasks.journal.records import (
    COLUMNS,
    Accept,
    Ended,
    Operation,
    StoredResult,
    TaskRow,
    Tokens,
    end_of,
    pack,
    read_record,
)
from orchestrator.tasks.journal.store import (
    Found,
    GroupCommit,
    JournalStore,
    LookUps,
    Question,
    WriterCalls,
)
from orchestrator.telemetry.log import fields, service_log

TIDY_ROWS = 2000
"""Maximum number of rows to remove at a time, so that submissions do not wait."""

_values_of = attrgetter(*COLUMNS)
_INSERT = (
    f"INSERT INTO tasks ({', '.join(COLUMNS)}) VALUES ({', '.join('?' * len(COLUMNS))}) "
    "ON CONFLICT (n) DO NOTHING"
)


def write(db: sqlite3.Connection, operations: Sequence[Operation]) -> None:
    """Write all operations in one transaction or none. A task's operations keep their order."""
    db.execute("BEGIN IMMEDIATE")
    # First, because a refused client may have submitted again under the same name.
    refused = {one.n for one in operations if isinstance(one, Ended) and not one.is_accepted}
    if refused:
        db.executemany(
            "UPDATE tasks SET idempotency_key = NULL WHERE n = ?", [(n,) for n in refused]
        )
    accepted = (one for one in operations if isinstance(one, Accept))
    _insert(db, list(accepted), refused)
    db.executemany(
        "INSERT OR REPLACE INTO tokens VALUES (?, ?, ?)",
        [(one.n, one.first, pack(one.tokens)) for one in operations if isinstance(one, Tokens)],
    )
    _end(db, [one for one in operations if isinstance(one, Ended)])
    if not operations:  # tests whether the disk accepts writes
        db.execute("INSERT OR REPLACE INTO meta VALUES ('looked', ?)", (b"",))
    db.execute("COMMIT")


def _insert(db: sqlite3.Connection, accepted: Sequence[Accept], nameless: set[int]) -> None:
    rows = (
        replace(one.row, idempotency_key=None) if one.row.n in nameless else one.row
        for one in accepted
    )
    db.executemany(_INSERT, map(_values_of, rows))
    db.executemany(
        "INSERT OR IGNORE INTO requests VALUES (?, ?)",
        [(one.row.n, pack(one.request)) for one in accepted if one.request is not None],
    )


def _end(db: sqlite3.Connection, ended: Sequence[Ended]) -> None:
    """End the tasks that have not ended: the first end counts."""
    if not ended:
        return
    numbers = [(one.n,) for one in ended]
    # First: on a full disk the other writes reuse this space.
    db.executemany("DELETE FROM requests WHERE n = ?", numbers)
    db.executemany("DELETE FROM tokens WHERE n = ?", numbers)
    db.executemany(
        "INSERT OR IGNORE INTO results (n, ended_unix, body) "
        "SELECT n, ?, ? FROM tasks WHERE n = ? AND ended_unix IS NULL",
        [(one.ended_unix, pack(one.result), one.n) for one in ended],
    )
    db.executemany(
        "UPDATE tasks SET ended_unix = ?, outcome = ?, finish_reason = ?, code = ?, "
        "completion_tokens = ?, idempotency_key = iif(?, idempotency_key, NULL) "
        "WHERE n = ? AND ended_unix IS NULL",
        [(*msgspec.structs.astuple(end_of(one)), one.is_accepted, one.n) for one in ended],
    )


def remove_old(db: sqlite3.Connection, results_before: float, tasks_before: float) -> int:
    """Remove rows that ended before these times, up to a bound; returns how many."""
    db.execute("BEGIN IMMEDIATE")
    removed = 0
    for table, before in (("results", results_before), ("tasks", tasks_before)):
        old = f"SELECT n FROM {table} WHERE ended_unix < ? ORDER BY ended_unix LIMIT ?"
        delete = f"DELETE FROM {table} WHERE n IN ({old})"
        removed += db.execute(delete, (before, TIDY_ROWS)).rowcount
    db.execute("COMMIT")
    return removed


SET_ASIDE_EVERY_S = 600.0
_TIDIES_PER_CHECKPOINT = 6


class JournalWriter(GroupCommit):
    """Writes to a file. A transaction that fails is rolled back."""

    failures = (sqlite3.Error, OSError, JournalError)

    def __init__(self, file: JournalFile, calls: WriterCalls) -> None:
        config = file.config
        super().__init__(str(config.path), config.terms.window_ms, calls)
        self._file = file
        self._config = config
        self.set_aside = "" if file.set_aside is None else file.set_aside.name
        self._db: sqlite3.Connection | None = None
        self._inode = 0
        self._lacks_live = False
        """Whether the file is new and still lacks the live tasks."""
        self._may_set_aside_at = 0.0
        self._tidied = 0

    def _failed(self, error: Exception) -> str:
        db = self._db
        if db is not None:
            try:
                if db.in_transaction:
                    db.execute("ROLLBACK")
            except sqlite3.Error:
                self._disconnect()
        if not isinstance(error, sqlite3.OperationalError):
            self._disconnect()
        if is_damage(error):
            self._begin_anew()
        name = getattr(error, "sqlite_errorname", None) or type(error).__name__
        return f"{describe_error(error, self._config.path)} ({name})"

    def _begin_anew(self) -> None:
        """Set a damaged file aside. The next try creates a new one with the live tasks; if that is
        damaged at once, the disk is faulty."""
        if time.monotonic() < self._may_set_aside_at:
            return
        self._may_set_aside_at = time.monotonic() + SET_ASIDE_EVERY_S
        try:
            self.set_aside = set_aside(self._config.path).name
        except OSError as error:
            service_log.error(
                "the damaged journal cannot be set aside: %s",
                error.strerror,
                extra=fields(journal=str(self._config.path)),
            )

    def _disconnect(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            try:
                db.close()
            except sqlite3.Error:
                service_log.exception("closing the journal failed")

    def _open(self) -> sqlite3.Connection:
        """The connection to the journal's file; a new file gets the live tasks."""
        inode = inode_of(self._config.path)
        self._lacks_live |= not inode
        if self._db is not None and self._inode != inode:
            service_log.error(
                "the journal's file is gone: it is written again",
                extra=fields(journal=str(self._config.path)),
            )
            self._disconnect()
        self._file.lock.require()
        if self._db is None:
            self._lacks_live |= self._inode not in (0, inode)
            prepare(self._config)
            db = self._db = connect(self._config)
            if self._lacks_live:
                write(db, self._calls.live())
                self._lacks_live = False
            self._inode = inode_of(self._config.path)
        return self._db

    def _write(self, operations: Sequence[Operation]) -> None:
        write(self._open(), operations)

    def _tidy(self) -> None:
        removed = 0
        self._busy_since = time.monotonic()
        try:
            db, now = self._open(), self._calls.unix()
            results_before = now - self._config.terms.keep_results_s
            removed = remove_old(db, results_before, now - store.KEEP_OUTCOMES_S)
            self._tidied += 1
            if self._tidied % _TIDIES_PER_CHECKPOINT == 0:
                # Truncate the write-ahead log too, which may still have removed prompts.
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except Exception as error:
            if not isinstance(error, self.failures):  # an internal error must not end the thread
                service_log.exception("removing old rows from the journal failed; will retry")
            self._tell(self._failed(error))
        finally:
            self._busy_since = None
        self._calls.on_fault(self._fault)  # the disk may have hung until now
        wait_s = store.RETRY_S if removed >= TIDY_ROWS else store.TIDY_EVERY_S
        self._tidy_at = time.monotonic() + wait_s


_LOOK = (
    f"SELECT {', '.join(f't.{name}' for name in COLUMNS)}, r.body FROM tasks t "
    "LEFT JOIN results r ON r.n = t.n"
)


class JournalReader(LookUps):
    failures = (sqlite3.Error, OSError)

    def __init__(self, file: JournalFile) -> None:
        super().__init__()
        self._file = file
        self._db: sqlite3.Connection | None = None
        self._inode = 0

    def _look(self, question: Question) -> Found | None:
        by_id = isinstance(question, str)
        where = "t.id = ?" if by_id else "t.key = ? AND t.idempotency_key = ?"
        values = (question,) if by_id else question
        try:
            found = self._connection().execute(f"{_LOOK} WHERE {where}", values).fetchone()
        except sqlite3.Error:
            self._disconnect()
            raise
        if found is None:
            return None
        *columns, body = found
        row = TaskRow(*columns)
        return Found(row, read_record(StoredResult, row.n, body))

    def _told(self, error: Exception) -> str:
        return describe_error(error, self._file.config.path)

    def _connection(self) -> sqlite3.Connection:
        inode = os.stat(self._file.config.path).st_ino
        if self._db is None or inode != self._inode:
            self._disconnect()
            self._db, self._inode = connect(self._file.config), inode
        return self._db

    def _disconnect(self) -> None:
        db, self._db = self._db, None
        if db is not None:
            db.close()


def store_of(file: JournalFile) -> JournalStore:
    window_ms = file.config.terms.window_ms
    writer, reader = partial(JournalWriter, file), partial(JournalReader, file)
    unfinished = file.unfinished
    return JournalStore(file.boot, window_ms, file.next_n, unfinished, writer, reader, file.close)
