"""Looks tasks up in a store of the journal, on a thread of its own that never waits for writes."""

import asyncio
import queue
import threading
from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass
from typing import ClassVar

from orchestrator.errors import JournalUnavailable
from orchestrator.tasks.journal.records import StoredResult, TaskRow

READ_WAIT_S = 5.0
"""Longest wait for the store, in seconds; a slower one is as good as broken."""
CLOSE_WAIT_S = 1.0


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
    """Errors of the store."""

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
            self._thread.join(CLOSE_WAIT_S)

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
