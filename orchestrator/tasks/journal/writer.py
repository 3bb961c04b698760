"""Writes the journal's file, by group commit (``group_commit``)."""

import os
import sqlite3
import time
from collections.abc import Callable, Sequence

from orchestrator.tasks.journal import group_commit
from orchestrator.tasks.journal.ages import AgeClock
from orchestrator.tasks.journal.file import (
    JournalFile,
    connect,
    describe_error,
    is_damage,
    prepare,
    set_aside,
)
from orchestrator.tasks.journal.group_commit import GroupCommit
from orchestrator.tasks.journal.lock import JournalError
from orchestrator.tasks.journal.operations import Accept, Batch, Operation
from orchestrator.tasks.journal.transaction import TIDY_ROWS, remove_old, write
from orchestrator.telemetry.log import fields, service_log

SET_ASIDE_EVERY_S = 600.0
_TIDIES_PER_CHECKPOINT = 6


class JournalWriter(GroupCommit):
    """Writes to a file. A transaction that fails is rolled back."""

    failures = (sqlite3.Error, OSError, JournalError)

    def __init__(
        self,
        file: JournalFile,
        unix: Callable[[], float],
        *,
        on_batch: Callable[[Batch], None],
        on_fault: Callable[[str], None],
        live: Callable[[], Sequence[Accept]],
    ) -> None:
        """``live`` returns the tasks that have not ended, with which a new file begins."""
        config = file.config
        window_ms = config.terms.window_ms
        super().__init__(str(config.path), window_ms, on_batch=on_batch, on_fault=on_fault)
        self._file = file
        self._config = config
        self._ages = AgeClock(unix, file.boot)
        self._live = live
        self._aside = file.set_aside
        self._db: sqlite3.Connection | None = None
        self._inode = 0
        self._lacks_live = False
        """Whether the file is a new one that still lacks the live tasks."""
        self._may_set_aside_at = 0.0
        self._tidied = 0

    @property
    def set_aside(self) -> str:
        """New name of a damaged file, in the journal's folder; empty where there is none."""
        return "" if self._aside is None else self._aside.name

    def _failed(self, error: Exception) -> str:
        """Give the transaction up; returns a description of the error."""
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
        """Put a damaged file aside. The next try makes a new one, with the live tasks; if that is
        damaged at once, the disk is at fault."""
        self._disconnect()
        if time.monotonic() < self._may_set_aside_at:
            return
        self._may_set_aside_at = time.monotonic() + SET_ASIDE_EVERY_S
        try:
            self._aside = set_aside(self._config.path)
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
        """The connection, to the file that has the journal's name. A new file gets the live
        tasks."""
        inode = self._inode_now()
        self._lacks_live |= not inode
        if self._db is not None and self._inode != inode:
            service_log.error(
                "the journal's file is gone: it is written anew",
                extra=fields(journal=str(self._config.path)),
            )
            self._disconnect()
        self._file.lock.require()
        if self._db is None:
            self._lacks_live |= self._inode not in (0, inode)
            prepare(self._config)
            db = self._db = connect(self._config)
            self._ages.load(db)
            self._ages.save(db)
            if self._lacks_live:
                write(db, self._live(), self._ages.now())
                self._lacks_live = False
            self._inode = self._inode_now()
        return self._db

    def _inode_now(self) -> int:
        """Inode of the journal's file; 0 if there is none."""
        try:
            return os.stat(self._config.path).st_ino
        except FileNotFoundError:
            return 0

    def _write(self, operations: Sequence[Operation]) -> None:
        db = self._open()
        write(db, operations, self._ages.now())

    # ── retention ────────────────────────────────────────────────────────────────────────────

    def _tidy(self) -> None:
        """Remove rows beyond their age, a bounded number at a time."""
        removed = 0
        self._busy_since = time.monotonic()
        try:
            db = self._open()
            now = self._ages.now()
            terms = self._config.terms
            old_result, old = now - terms.keep_results_s, now - terms.keep_s
            removed = remove_old(db, old_result, old)
            self._tidied += 1
            if self._tidied % _TIDIES_PER_CHECKPOINT == 0:
                self._ages.save(db)
                # The write-ahead log goes too, with what it still has of removed prompts.
                db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except (sqlite3.Error, OSError, JournalError) as error:
            self._tell(self._failed(error))
        except Exception as error:  # a fault of ours must not end the thread
            service_log.exception("removing what is old from the journal failed; will retry")
            self._tell(self._failed(error))
        finally:
            self._busy_since = None
        self._on_fault(self._fault)  # the disk may have hung until now, and that is over
        wait_s = group_commit.RETRY_S if removed >= TIDY_ROWS else group_commit.TIDY_EVERY_S
        self._tidy_at = time.monotonic() + wait_s
