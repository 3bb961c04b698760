"""Group commit: everything that came while one transaction was written goes into the next.

A transaction that fails is given up as a whole: tasks in it are not accepted, tokens in it are
written later, and ends in it are kept and tried again until the store takes them. Meanwhile the
journal has a ``fault``; the thread checks every second whether it is over.
"""

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar

from orchestrator.tasks.journal.operations import Accept, Batch, Ended, Operation, Tokens
from orchestrator.telemetry.log import fields, service_log

MAX_OPERATIONS = 2048
"""Most operations in one transaction."""
RETRY_S = 1.0
CLOSE_WAIT_S = 5.0
TIDY_EVERY_S = 10.0


class GroupCommit(ABC):
    """Writes on a thread of its own, to a store that a subclass knows. ``on_batch`` and
    ``on_fault`` are called there, too."""

    failures: ClassVar[tuple[type[Exception], ...]] = (OSError,)
    """Errors of the store; any other is a fault of this program."""

    def __init__(
        self,
        where: str,
        window_ms: float,
        *,
        on_batch: Callable[[Batch], None],
        on_fault: Callable[[str], None],
    ) -> None:
        """``where``: the store, as the log names it. ``window_ms``: how long a transaction waits
        for more, in ms."""
        self._where = where
        self._window_ms = window_ms
        self._on_batch = on_batch
        self._on_fault = on_fault
        self._inbox: queue.SimpleQueue[Operation | None] = queue.SimpleQueue()
        self._unwritten: list[Operation] = []
        """Promised operations that the store did not take."""
        self._fault = ""
        self._busy_since: float | None = None
        self._is_closing = False
        self._batch = Batch()
        """The batch that is being written."""
        self._tidy_at = 0.0
        self._thread = threading.Thread(target=self._run, name="tidegate-journal", daemon=True)

    @property
    def unwritten(self) -> int:
        """How many promised operations wait for the store."""
        return len(self._unwritten)

    @property
    def stuck_s(self) -> float:
        """Seconds that the transaction being written has taken; 0 if there is none."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    @property
    def set_aside(self) -> str:
        """New name of a damaged file; empty where there is none."""
        return ""

    def start(self) -> None:
        self._thread.start()

    def put(self, operation: Operation) -> None:
        """Write an operation with the next transaction. Never waits."""
        self._inbox.put(operation)

    def close(self) -> bool:
        """Write everything there is, then end the thread. False where the store does not let it
        end."""
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
        """Give up what ``_write`` has begun; returns a description of the error, for clients."""

    @abstractmethod
    def _tidy(self) -> None:
        """Do what is due now and then, and set ``_tidy_at`` to when it is due again. Raises
        nothing."""

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
        began = time.perf_counter()
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
        is tried for ever. Returns those that the store did not take, to be tried again."""
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
        """The operations that must be written sooner or later: not tokens, which are still in
        memory."""
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
        self._on_fault(fault)
