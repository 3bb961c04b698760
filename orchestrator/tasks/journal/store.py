"""The store of durable tasks: this orchestrator's file, or a shared store.

Writes use group commit: all operations that arrive during one transaction go into the next. A
failed transaction is dropped as a whole: its tasks are not accepted, its tokens are written later,
and its ends are kept and retried until the store accepts them. Meanwhile the journal has a
``fault``; the thread checks every second whether it is over. Lookups have their own thread, which
never waits for writes.
"""

import asyncio
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import ClassVar, Final

from orchestrator.clock import Boot
from orchestrator.errors import JournalUnavailable
from orchestrator.tasks.journal.records import (
    Accept,
    Batch,
    Ended,
    Operation,
    StoredResult,
    TaskRow,
    Tokens,
    UnfinishedTask,
)
from orchestrator.telemetry.log import fields, service_log

KEEP_OUTCOMES_S: Final = 7 * 86_400.0
"""Seconds for which a durable task's outcome and ``Idempotency-Key`` are kept after its end
(OR-5)."""


@dataclass(frozen=True, slots=True)
class JournalTerms:
    """The permitted loss of durable tasks, and their retention."""

    window_ms: float = 0.0
    """How much may be lost with the process, in ms; 0: a task is stored before its 202."""
    keep_results_s: float = 86_400.0
    """Seconds for which a task's text is kept after its end."""


MAX_OPERATIONS = 2048
RETRY_S = 1.0
CLOSE_WAIT_S = 5.0
TIDY_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class WriterCalls:
    """A writer's callbacks; it calls them on its own thread."""

    unix: Callable[[], float]
    on_batch: Callable[[Batch], None]
    on_fault: Callable[[str], None]
    live: Callable[[], Sequence[Accept]]
    """Returns the live tasks, to write into an empty store."""


class GroupCommit(ABC):
    """Writes to a subclass's store on its own thread."""

    failures: ClassVar[tuple[type[Exception], ...]] = (OSError,)
    """Errors of the store; any other error is a bug in this program."""

    def __init__(self, where: str, window_ms: float, calls: WriterCalls) -> None:
        """``where``: the store's name in the log. ``window_ms``: ms that a transaction waits for
        more operations."""
        self.set_aside = ""
        """New name of a damaged file; empty if there is none."""
        self._where = where
        self._window_ms = window_ms
        self._calls = calls
        self._inbox: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._unwritten: list[Operation] = []
        """Promised operations that the store has not accepted."""
        self._fault = ""
        self._busy_since: float | None = None
        self._is_closing = False
        self._batch = Batch()
        self._tidy_at = 0.0
        self._thread = threading.Thread(target=self._run, name="tidegate-journal", daemon=True)

    @property
    def unwritten(self) -> int:
        return len(self._unwritten)

    @property
    def stuck_s(self) -> float:
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def start(self) -> None:
        self._thread.start()

    def put(self, operation: Operation) -> None:
        self._inbox.put(operation)

    def close(self) -> bool:
        """Write the remaining operations and end the thread. False if the store blocks it."""
        self._inbox.put(None)
        self._thread.join(CLOSE_WAIT_S)
        return not self._thread.is_alive()

    # ── what a store does ────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _write(self, operations: Sequence[Operation]) -> None:
        """Write all operations or none; without operations, test whether the store accepts writes.
        Raises one of ``failures``."""

    @abstractmethod
    def _failed(self, error: Exception) -> str:
        """Roll back a started ``_write``; returns a description of the error for clients."""

    @abstractmethod
    def _tidy(self) -> None:
        """Do periodic work, and set ``_tidy_at`` to the next time. Must not raise."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Let go of the store, at the thread's end."""

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
                "the last records of the journal were not written: their tasks may run again",
                extra=fields(journal=self._where, records=len(self._unwritten)),
            )
        self._disconnect()

    def _collect(self) -> list[Operation]:
        """Wait for operations to write; returns all that have arrived by then."""
        wait_s = RETRY_S
        if not self._fault and not self._unwritten:
            wait_s = min(max(self._tidy_at - time.monotonic(), 0.0), TIDY_EVERY_S)
        try:
            first = self._inbox.get(timeout=wait_s)
        except queue.Empty:
            return []
        if first is not None and self._window_ms:
            time.sleep(self._window_ms / 1000)
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
        kept = self._unwritten
        batch = self._batch = Batch(operations)
        self._busy_since = time.monotonic()
        try:
            self._write([*kept, *operations])
            self._unwritten = []
        except self.failures as error:
            batch.fault = self._failed(error)
            self._unwritten = self._promised([*kept, *operations])
        except Exception as error:  # an internal error
            service_log.exception("the journal failed; dropping operations that cannot be written")
            batch.fault = self._failed(error)
            self._unwritten = self._one_by_one([*kept, *self._promised(operations)])
        finally:
            self._busy_since = None
        if operations:
            self._calls.on_batch(batch)
        self._tell(batch.fault)

    def _one_by_one(self, promised: Sequence[Operation]) -> list[Operation]:
        """Write each operation alone, so that one that cannot be written does not block others or
        retry forever. Returns those to retry."""
        unwritten: list[Operation] = []
        for one in promised:
            try:
                self._write([one])
            except self.failures as error:
                self._failed(error)
                unwritten.append(one)
            except Exception as error:  # this one failed
                self._failed(error)
        return unwritten

    def _promised(self, operations: Sequence[Operation]) -> list[Operation]:
        """The operations that must be written. Tokens are excluded: they are still in memory."""
        if self._window_ms:
            return [one for one in operations if not isinstance(one, Tokens)]
        # A task that was never accepted needs no end.
        refused = {one.row.n for one in operations if isinstance(one, Accept)}
        return [one for one in operations if isinstance(one, Ended) and one.n not in refused]

    def _tell(self, fault: str) -> None:
        if fault == self._fault:
            return
        if fault and not self._fault:
            service_log.error(
                "the journal cannot be written: no durable task is accepted; will retry",
                extra=fields(journal=self._where, error=fault),
            )
        elif not fault:
            service_log.info("the journal can be written again", extra=fields(journal=self._where))
        self._fault = fault
        self._calls.on_fault(fault)


READ_WAIT_S = 5.0
"""Maximum wait for the store in seconds; a slower store counts as broken."""
READ_CLOSE_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Found:
    """A task in the journal; ``result`` is None while it lives and after the result is removed."""

    row: TaskRow
    result: StoredResult | None


Question = str | tuple[str, str]
"""A task's id, or a client's key and its name for a submission."""


class LookUps(ABC):
    """Answers queries from a subclass's store."""

    failures: ClassVar[tuple[type[Exception], ...]] = (OSError,)

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[tuple[Future[Found | None], Question] | None] = (
            queue.SimpleQueue()
        )
        # A daemon thread: one that hangs on its store must not block the exit.
        self._thread = threading.Thread(target=self._run, name="tidegate-journal-read", daemon=True)
        self._is_closed = False

    async def find(self, question: Question) -> Found | None:
        """A task of this or an earlier process. Raises ``JournalUnavailable``."""
        if self._is_closed:
            raise JournalUnavailable("the journal cannot be read: the service is shutting down")
        if not self._thread.is_alive():
            self._thread.start()
        answer: Future[Found | None] = Future()
        self._inbox.put((answer, question))
        try:
            async with asyncio.timeout(READ_WAIT_S):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            raise JournalUnavailable(
                f"the journal cannot be read: no answer within {READ_WAIT_S:g} s"
            ) from None
        except self.failures as error:
            raise JournalUnavailable(f"the journal cannot be read: {self._told(error)}") from None

    def close(self) -> None:
        """End the thread; waits briefly for a running lookup."""
        self._is_closed = True
        self._inbox.put(None)
        if self._thread.is_alive():
            self._thread.join(READ_CLOSE_WAIT_S)

    # ── what a store does ────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _look(self, question: Question) -> Found | None:
        """Answer a question. Raises one of ``failures``."""

    @abstractmethod
    def _told(self, error: Exception) -> str:
        """A description of one of ``failures``, for clients."""

    @abstractmethod
    def _disconnect(self) -> None:
        """Let go of the store, at the thread's end."""

    def _run(self) -> None:
        while (asked := self._inbox.get()) is not None:
            answer, question = asked
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(self._look(question))
            except BaseException as error:
                answer.set_exception(error)
        self._disconnect()


@dataclass(frozen=True, slots=True)
class JournalStore:
    boot: Boot
    window_ms: float
    """How much may be lost with the process, in ms; 0: a task is stored before its 202."""
    next_n: int
    """Number of the next task; numbers rise within a process."""
    unfinished: Sequence[UnfinishedTask]
    """Tasks that an earlier process left here."""
    new_writer: Callable[[WriterCalls], GroupCommit]
    new_reader: Callable[[], LookUps]
    close: Callable[[], None]
    """Releases the store. Do not write to it after that."""
