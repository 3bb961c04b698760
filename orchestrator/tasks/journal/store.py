"""The store of durable tasks: a file of this orchestrator, or one that several share.

Writes are by group commit: everything that came while one transaction was written goes into the
next. A transaction that fails is dropped as a whole: tasks in it are not accepted, tokens in it are
written later, and ends in it are kept and tried again until the store takes them. Meanwhile the
journal has a ``fault``; the thread checks every second whether it is over. Look-ups have a thread
of their own that never waits for writes.
"""

import asyncio
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import ClassVar, Final, Protocol

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
    """How much of a durable task may be lost, and how long it is kept."""

    window_ms: float = 0.0
    """How much may be lost with the process, in ms; 0: a task is stored before its 202."""
    keep_results_s: float = 86_400.0
    """How long a task's text is kept after its end, in seconds."""


MAX_OPERATIONS = 2048
RETRY_S = 1.0
CLOSE_WAIT_S = 5.0
TIDY_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class WriterCalls:
    """What a writer calls, on its own thread."""

    unix: Callable[[], float]
    on_batch: Callable[[Batch], None]
    on_fault: Callable[[str], None]
    live: Callable[[], Sequence[Accept]]
    """Returns the tasks that have not ended, with which an empty store begins."""


class GroupCommit(ABC):
    """Writes on a thread of its own, to a store that a subclass knows."""

    failures: ClassVar[tuple[type[Exception], ...]] = (OSError,)
    """Errors of the store; any other is a fault of this program."""

    def __init__(self, where: str, window_ms: float, calls: WriterCalls) -> None:
        """``where``: the store, as the log names it. ``window_ms``: how long a transaction waits
        for more, in ms."""
        self._where = where
        self._window_ms = window_ms
        self._calls = calls
        self._inbox: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._unwritten: list[Operation] = []
        """Promised operations that the store did not take."""
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

    @property
    def set_aside(self) -> str:
        """New name of a damaged file; empty without one."""
        return ""

    def start(self) -> None:
        self._thread.start()

    def put(self, operation: Operation) -> None:
        self._inbox.put(operation)

    def close(self) -> bool:
        """Write what is left and end the thread. False if the store does not let it end."""
        self._inbox.put(None)
        self._thread.join(CLOSE_WAIT_S)
        return not self._thread.is_alive()

    # ── what a store does ────────────────────────────────────────────────────────────────────

    @abstractmethod
    def _write(self, operations: Sequence[Operation]) -> None:
        """Write all operations, or none; without any, test whether the store takes anything.
        Raises one of ``failures``."""

    @abstractmethod
    def _failed(self, error: Exception) -> str:
        """Roll back what ``_write`` has begun; returns the error's description, for clients."""

    @abstractmethod
    def _tidy(self) -> None:
        """Do periodic work, and set ``_tidy_at`` to when it is due again. Raises nothing."""

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
                "the last of the journal could not be written: those tasks may run again",
                extra=fields(journal=self._where, records=len(self._unwritten)),
            )
        self._disconnect()

    def _collect(self) -> list[Operation]:
        """Wait for operations to write; returns all that have come by then."""
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
        except Exception as error:  # a fault of ours
            service_log.exception("the journal failed; what cannot be written is dropped")
            batch.fault = self._failed(error)
            self._unwritten = self._one_by_one([*kept, *self._promised(operations)])
        finally:
            self._busy_since = None
        if operations:
            self._calls.on_batch(batch)
        self._tell(batch.fault)

    def _one_by_one(self, promised: Sequence[Operation]) -> list[Operation]:
        """Write each operation alone, so that one that cannot be written does not block others or
        retry for ever. Returns those to retry."""
        unwritten: list[Operation] = []
        for one in promised:
            try:
                self._write([one])
            except self.failures as error:
                self._failed(error)
                unwritten.append(one)
            except Exception as error:  # this is the one
                self._failed(error)
        return unwritten

    def _promised(self, operations: Sequence[Operation]) -> list[Operation]:
        """The operations that must be written: not tokens, which are still in memory."""
        if self._window_ms:
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
                extra=fields(journal=self._where, error=fault),
            )
        elif not fault:
            service_log.info("the journal can be written again", extra=fields(journal=self._where))
        self._fault = fault
        self._calls.on_fault(fault)


READ_WAIT_S = 5.0
"""Longest wait for the store, in seconds; a slower one is as good as broken."""
READ_CLOSE_WAIT_S = 1.0


@dataclass(frozen=True, slots=True)
class Found:
    """A task in the journal; ``result`` is None while it lives, and once the result is removed."""

    row: TaskRow
    result: StoredResult | None


@dataclass(frozen=True, slots=True)
class ById:
    """Asks for the task of an id."""

    task_id: str


@dataclass(frozen=True, slots=True)
class BySubmission:
    """Asks for the task that a key's client has submitted under a name."""

    key: str
    idempotency_key: str


Question = ById | BySubmission


class LookUps(ABC):
    """Answers questions from a store that a subclass knows."""

    failures: ClassVar[tuple[type[Exception], ...]] = (OSError,)

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[tuple[Future[Found | None], Question] | None] = (
            queue.SimpleQueue()
        )
        # A daemon, because a thread that hangs on its store must not keep the process.
        self._thread = threading.Thread(target=self._run, name="tidegate-journal-read", daemon=True)
        self._is_closed = False

    async def find(self, task_id: str) -> Found | None:
        """A task by its id, of this process or an earlier one. Raises ``JournalUnavailable``."""
        return await self._ask(ById(task_id))

    async def find_submission(self, key: str, idempotency_key: str) -> Found | None:
        """A task by its client's name for the submission. Raises ``JournalUnavailable``."""
        return await self._ask(BySubmission(key, idempotency_key))

    def close(self) -> None:
        """End the thread; waits a moment for a look-up in progress."""
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

    # ── inside ───────────────────────────────────────────────────────────────────────────────

    async def _ask(self, question: Question) -> Found | None:
        if self._is_closed:
            raise JournalUnavailable("the journal cannot be read: the service is going down")
        if not self._thread.is_alive():
            self._thread.start()
        answer: Future[Found | None] = Future()
        self._inbox.put((answer, question))
        try:
            async with asyncio.timeout(READ_WAIT_S):
                return await asyncio.wrap_future(answer)
        except TimeoutError:
            raise JournalUnavailable(
                f"the journal cannot be read: it has not answered within {READ_WAIT_S:g} s"
            ) from None
        except self.failures as error:
            raise JournalUnavailable(f"the journal cannot be read: {self._told(error)}") from None

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


class JournalStore(Protocol):
    """An opened store, until ``close``."""

    @property
    def boot(self) -> Boot: ...

    @property
    def window_ms(self) -> float:
        """How much may be lost with the process, in ms; 0: a task is stored before its 202."""

    @property
    def next_n(self) -> int:
        """Number of the next task; tasks have rising numbers within a process."""

    @property
    def unfinished(self) -> Sequence[UnfinishedTask]:
        """Tasks that an earlier process left here."""

    def new_writer(self, calls: WriterCalls) -> GroupCommit:
        """What writes to the store, not started yet."""

    def new_reader(self) -> LookUps:
        """What looks tasks up in the store."""

    def close(self) -> None:
        """Release the store. It must not be written to any more."""
