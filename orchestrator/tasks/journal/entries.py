"""A live durable task's place in the journal, and how much of it is on its way to the disk."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.errors import JournalUnavailable, KeyInUse
from orchestrator.tasks.journal.records import (
    Accept,
    StoredTokens,
    Tokens,
    UnfinishedTask,
    pack_ids,
)
from orchestrator.tasks.task import Task


@dataclass(slots=True, eq=False)
class Entry:
    """A live task's place in the journal."""

    n: int
    task: Task
    accept: Accept | None
    """The record that a new file begins with; dropped at the end, because the prompt is in it."""
    committed: asyncio.Future[None]
    """Done once the acceptance is on the disk; raises ``JournalUnavailable``."""
    begun: float
    tokens: int = 0
    """How many tokens have been handed to the writer."""
    keeps_tokens: bool = True
    is_recorded: bool = False
    is_refused: bool = False
    is_left: bool = False
    waiting: list[Callable[[], None]] = field(default_factory=list)

    def when_recorded(self, call: Callable[[], None]) -> None:
        """Call once the end is on the disk, or cannot be for now; at once where it is."""
        if self.is_recorded:
            call()
        else:
            self.waiting.append(call)

    def recorded(self) -> None:
        self.is_recorded = True
        waiting, self.waiting = self.waiting, []
        for call in waiting:
            call()

    def unfinished(self, now: float) -> UnfinishedTask:
        """The task as another process would find it."""
        assert self.accept is not None
        transcript = self.task.transcript
        tokens = StoredTokens(b"", [])
        if transcript is not None:
            tokens = StoredTokens(
                pack_ids(transcript.ids),
                list(transcript.texts),
                self.task.time_spent.seconds(now),
            )
        return UnfinishedTask(self.accept.row, self.accept.request, tokens)

    def new_tokens(self, now: float) -> Tokens | None:
        """Tokens since the last call, as they are handed to the writer; None if there are none."""
        transcript = self.task.transcript
        if transcript is None or not self.keeps_tokens or len(transcript.ids) <= self.tokens:
            return None
        first = self.tokens
        ids, texts = transcript.ids[first:], transcript.texts[first:]
        self.tokens += len(ids)
        spent_s = self.task.time_spent.seconds(now)
        return Tokens(self.n, first, StoredTokens(pack_ids(ids), texts, spent_s))

    def decide(self, fault: str) -> None:
        if self.committed.done():
            return
        if fault:
            error = JournalUnavailable(f"the task could not be made durable: {fault}")
            self.committed.set_exception(error)
        else:
            self.committed.set_result(None)

    def refuse_name(self) -> None:
        """Note that another submission of the same key has the task's name."""
        if not self.committed.done():
            self.committed.set_exception(
                KeyInUse(
                    "another submission with this Idempotency-Key has just been accepted; send it "
                    "again to get that one's task"
                )
            )


def new_entry(task: Task, accept: Accept) -> Entry:
    """Make an entry. To be called on the event loop."""
    loop = asyncio.get_running_loop()
    committed = loop.create_future()
    committed.add_done_callback(_retrieve)
    return Entry(accept.row.n, task, accept, committed, loop.time())


def _retrieve(future: asyncio.Future[None]) -> None:
    """Read the future's error, so that it is not reported when nobody waits for it any more."""
    if not future.cancelled():
        future.exception()
