"""The journal's thread: everything that came while one transaction was written goes into the next.

A transaction that fails is rolled back as a whole: tasks in it are not accepted, tokens in it are
written later, and ends in it are kept and tried again until the disk takes them. Meanwhile the
journal has a ``fault``; the thread checks every second whether it is over.
"""

import os
import queue
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence

from orchestrator.tasks.journal.ages import AgeClock
from orchestrator.tasks.journal.file import (
    JournalFile,
    connect,
    is_damage,
    prepare,
    set_aside,
    told,
)
from orchestrator.tasks.journal.lock import JournalError
from orchestrator.tasks.journal.operations import Accept, Batch, Ended, Operation, Tokens
from orchestrator.tasks.journal.resealing import Resealing
from orchestrator.tasks.journal.transaction import TIDY_ROWS, remove_old, write
from orchestrator.telemetry.log import fields, service_log

MAX_OPERATIONS = 2048
"""Most operations in one transaction."""
RETRY_S = 1.0
CLOSE_WAIT_S = 5.0
SET_ASIDE_EVERY_S = 600.0
TIDY_EVERY_S = 10.0
RESEAL_EVERY_S = 0.1
_TIDIES_PER_CHECKPOINT = 6


class JournalWriter:
    """Writes on a thread of its own. ``on_batch`` and ``on_fault`` are called there, too."""

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
        self._file = file
        self._config = file.config
        self._ages = AgeClock(unix, file.boot)
        self._resealing = Resealing(file.sealer, file.foreign_rows > 0)
        self._on_batch = on_batch
        self._on_fault = on_fault
        self._live = live
        self._inbox: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._unwritten: list[Operation] = []
        """Promised operations that the disk did not take."""
        self.set_aside = file.set_aside
        """New path of a damaged file; None where there is none."""
        self._db: sqlite3.Connection | None = None
        self._inode = 0
        self._lacks_live = False
        """Whether the file is a new one that still lacks the live tasks."""
        self._fault = ""
        self._busy_since: float | None = None
        self._is_closing = False
        self._may_set_aside_at = 0.0
        self._tidy_at = 0.0
        self._tidied = 0
        self._thread = threading.Thread(target=self._run, name="tidegate-journal", daemon=True)

    @property
    def unwritten(self) -> int:
        """How many promised operations wait for the disk."""
        return len(self._unwritten)

    @property
    def stuck_s(self) -> float:
        """Seconds that the transaction being written has taken; 0 if there is none."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def start(self) -> None:
        self._thread.start()

    def put(self, operation: Operation) -> None:
        """Write an operation with the next transaction. Never waits."""
        self._inbox.put(operation)

    def close(self) -> bool:
        """Write everything there is, then end the thread. False where the disk does not let it
        end."""
        self._inbox.put(None)
        self._thread.join(CLOSE_WAIT_S)
        return not self._thread.is_alive()

    # ── the thread ───────────────────────────────────────────────────────────────────────────

    def _run(self) -> None:
        while not self._is_closing:
            operations = self._collect()
            if operations or self._unwritten or self._fault:
                self._commit(operations)
            if not self._fault and time.monotonic() >= self._tidy_at:
                self._tidy()
        if self._unwritten:
            service_log.error(
                "the last of the journal could not be written: those tasks may run again",
                extra=fields(journal=str(self._config.path), records=len(self._unwritten)),
            )
        self._close_db()

    def _collect(self) -> list[Operation]:
        """Wait for operations to write; returns all that have come by then."""
        wait_s = RETRY_S
        if not self._fault and not self._unwritten:
            wait_s = min(max(self._tidy_at - time.monotonic(), 0.0), TIDY_EVERY_S)
        try:
            first = self._inbox.get(timeout=wait_s)
        except queue.Empty:
            return []
        if first is not None and self._config.window_ms:
            time.sleep(self._config.window_ms / 1000)
        found: list[Operation] = []
        while first is not None:
            found.append(first)
            if len(found) >= MAX_OPERATIONS:
                return found
            try:
                first = self._inbox.get_nowait()
            except queue.Empty:
                return found
        self._is_closing = True
        return found

    def _commit(self, operations: list[Operation]) -> None:
        began = time.perf_counter()
        kept = self._unwritten
        batch = Batch(operations)
        self._busy_since = time.monotonic()
        try:
            self._write([*kept, *operations])
            self._unwritten = []
        except (sqlite3.Error, OSError, JournalError) as error:
            batch.fault = self._failed(error)
            self._unwritten = [*kept, *self._promised(operations)]
        except Exception as error:  # a fault of ours
            service_log.exception("the journal failed; what cannot be written is given up")
            batch.fault = self._failed(error)
            self._unwritten = self._one_by_one([*kept, *self._promised(operations)])
        finally:
            self._busy_since = None
        batch.took_s = time.perf_counter() - began
        if operations:
            self._on_batch(batch)
        self._tell(batch.fault)

    def _one_by_one(self, promised: Sequence[Operation]) -> list[Operation]:
        """Write each operation by itself, lest one that cannot be written takes others with it, or
        is tried for ever. Returns those that the disk did not take, to be tried again."""
        unwritten: list[Operation] = []
        for one in promised:
            try:
                self._write([one])
            except (sqlite3.Error, OSError, JournalError) as error:
                self._failed(error)
                unwritten.append(one)
            except Exception as error:  # this is the one
                self._failed(error)
        return unwritten

    def _promised(self, operations: Sequence[Operation]) -> list[Operation]:
        """The operations that must be written sooner or later: not tokens, which are still in
        memory."""
        if self._config.window_ms:
            return [one for one in operations if not isinstance(one, Tokens)]
        # Nothing is left to be said of a task that was never accepted.
        refused = {one.row.n for one in operations if isinstance(one, Accept)}
        return [one for one in operations if isinstance(one, Ended) and one.n not in refused]

    def _tell(self, fault: str) -> None:
        if fault == self._fault:
            return
        if fault and not self._fault:
            service_log.error(
                "the journal cannot be written: no durable task is accepted; will retry",
                extra=fields(journal=str(self._config.path), error=fault),
            )
        elif not fault:
            service_log.info(
                "the journal can be written again", extra=fields(journal=str(self._config.path))
            )
        self._fault = fault
        self._on_fault(fault)

    def _failed(self, error: Exception) -> str:
        """Give the transaction up; returns a description of the error."""
        db = self._db
        if db is not None:
            try:
                if db.in_transaction:
                    db.execute("ROLLBACK")
            except sqlite3.Error:
                self._close_db()
        if not isinstance(error, sqlite3.OperationalError):
            self._close_db()
        if is_damage(error):
            self._begin_anew()
        name = getattr(error, "sqlite_errorname", None) or type(error).__name__
        return f"{told(error, self._config.path)} ({name})"

    def _begin_anew(self) -> None:
        """Put a damaged file aside. The next try makes a new one, with the live tasks; if that is
        damaged at once, the disk is at fault."""
        self._close_db()
        if time.monotonic() < self._may_set_aside_at:
            return
        self._may_set_aside_at = time.monotonic() + SET_ASIDE_EVERY_S
        try:
            self.set_aside = set_aside(self._config.path)
        except OSError as error:
            service_log.error(
                "the damaged journal cannot be set aside: %s",
                error.strerror,
                extra=fields(journal=str(self._config.path)),
            )

    def _close_db(self) -> None:
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
            self._close_db()
        self._file.lock.require()
        if self._db is None:
            self._lacks_live |= self._inode not in (0, inode)
            prepare(self._config, self._file.sealer)
            db = self._db = connect(self._config)
            self._ages.load(db)
            self._ages.save(db)
            if self._lacks_live:
                write(db, self._file.sealer.seal, self._live(), self._ages.now())
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
        write(db, self._file.sealer.seal, operations, self._ages.now())

    # ── retention ────────────────────────────────────────────────────────────────────────────

    def _tidy(self) -> None:
        """Remove rows beyond their age and reseal rows of another key, a bounded number at a
        time."""
        removed = 0
        self._busy_since = time.monotonic()
        try:
            db = self._open()
            now = self._ages.now()
            old_result, old = now - self._config.keep_results_s, now - self._config.keep_s
            removed = remove_old(db, old_result, old)
            if not self._resealing.is_over:
                self._resealing.step(db)
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
        wait_s = RETRY_S if removed >= TIDY_ROWS else TIDY_EVERY_S
        if not self._resealing.is_over:
            wait_s = min(wait_s, RESEAL_EVERY_S)
        self._tidy_at = time.monotonic() + wait_s
