"""Durable tasks on the event loop: accept, run, end, find again (OR-5).

Tokens cost nothing here: a running task's tokens are read from its transcript every 250 ms. Clients
get an end only after its record is on disk, unless the disk fails, so that a crash never changes an
end that a client has seen.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVarTuple

from orchestrator.clock import Clock
from orchestrator.errors import (
    DeadlineExceeded,
    Draining,
    JournalUnavailable,
    KeyInUse,
    TidegateError,
)
from orchestrator.tasks.journal.records import (
    Accept,
    Batch,
    Ended,
    StoredTokens,
    TaskRow,
    Tokens,
    UnfinishedTask,
    pack_ids,
    request_of,
    result_of,
    row_of,
)
from orchestrator.tasks.journal.store import Found, JournalStore, Question, WriterCalls
from orchestrator.tasks.task import Task

COMMIT_WAIT_S = 5.0
"""Maximum wait for the disk in seconds; a slower disk counts as broken."""

_NAMED_ELSEWHERE = (
    "another submission with this Idempotency-Key has just been accepted; send it again to get "
    "that one's task"
)
Ts = TypeVarTuple("Ts")


@dataclass(slots=True, eq=False)
class Entry:
    """A live task's entry in the journal."""

    n: int
    task: Task
    accept: Accept | None
    """The record to write into a new file; dropped at the end, because it has the prompt."""
    committed: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )
    """Done when the acceptance is on disk; raises ``JournalUnavailable``."""
    begun: float = field(default_factory=lambda: asyncio.get_running_loop().time())
    tokens: int = 0
    keeps_tokens: bool = True
    """Whether new tokens are written; not of a task that is regenerated from its start."""
    is_recorded: bool = False
    is_refused: bool = False
    is_left: bool = False
    """Whether the next process continues the task; its end here is then not reported."""
    waiting: list[Callable[[], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Read its error here, so that it is not logged if nobody awaits it.
        self.committed.add_done_callback(lambda done: done.cancelled() or done.exception())

    def when_recorded(self, call: Callable[[], None]) -> None:
        """Call when the end is on disk or cannot be written for now; at once if it already is."""
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
        assert self.accept is not None
        tokens, transcript = StoredTokens(b"", []), self.task.transcript
        if transcript is not None:
            spent_s = self.task.time_spent.seconds(now)
            tokens = StoredTokens(pack_ids(transcript.ids), list(transcript.texts), spent_s)
        return UnfinishedTask(self.accept.row, self.accept.request, tokens)

    def decide(self, fault: str) -> None:
        if fault:
            self.refuse(JournalUnavailable(f"the task could not be made durable: {fault}"))
        elif not self.committed.done():
            self.committed.set_result(None)

    def refuse(self, error: TidegateError) -> None:
        if not self.committed.done():
            self.committed.set_exception(error)


class DurableTasks:
    """The journal of one orchestrator. All methods run on the event loop."""

    def __init__(self, store: JournalStore, clock: Clock) -> None:
        self.window_ms = store.window_ms
        """How much may be lost with the process, in ms; 0: a task is stored before its 202."""
        self.fault = ""
        """Why the journal cannot be written; empty if it can."""
        self.on_fault: Callable[[], None] = lambda: None
        self.commits = 0
        self.recovered: Counter[str] = Counter()
        """Number of tasks of an earlier process, by treatment."""
        self.on_lost: Callable[[Task], None] = lambda task: None
        """Called with each task that another orchestrator took over because this one was silent for
        too long."""
        self.lost = 0
        """Number of such tasks; the other orchestrator counts their outcomes."""
        self.on_outdone: Callable[[Task], None] = lambda task: None
        """Called with each task that ended here after another orchestrator took it over."""
        self.outdone = 0
        """Number of such tasks; each is in the outcomes of both."""
        self.boot = store.boot
        self._store = store
        self._clock = clock
        self._next_n = store.next_n
        self._live: dict[int, Entry] = {}
        self._ending: dict[int, Entry] = {}
        """Entries of ended tasks, by number, until the writer has processed the end."""
        self._left: list[Entry] = []
        self._undecided: dict[int, Entry] = {}
        """Entries whose clients wait for the disk, oldest first."""
        self._looks_at: asyncio.TimerHandle | None = None
        """One timer for all waiting clients: one each cost as much as the rest of the wait."""
        self._by_name: dict[tuple[str, str], Entry] = {}
        """Named submissions, until their names are in the file."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_closed = False
        self._reader = store.new_reader()
        calls = WriterCalls(
            clock.unix,
            on_batch=lambda batch: self._call(self._written, batch),
            on_fault=lambda fault: self._call(self._set_fault, fault),
            live=self._to_begin_with,
        )
        self.writer = store.new_writer(calls)

    # ── life ─────────────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.writer.start()

    async def close(self) -> None:
        """Write all pending operations, then release the file. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            await asyncio.to_thread(self._close)

    def _close(self) -> None:
        is_over = self._loop is None or self.writer.close()
        self._reader.close()
        if is_over:  # otherwise it stays locked until the exit: no second writer
            self._store.close()

    @property
    def live(self) -> int:
        return len(self._live)

    @property
    def left(self) -> int:
        return len(self._left)

    # ── a task's way ─────────────────────────────────────────────────────────────────────────

    def require(self) -> None:
        """Raise ``JournalUnavailable`` while the journal cannot be written."""
        if self.fault:
            raise JournalUnavailable(
                f"durable tasks are not accepted now, because the journal cannot be written: "
                f"{self.fault}; try again later, or without durable"
            )

    def accept(self, task: Task, model_digest: str) -> None:
        """Pass an admitted task to the writer; ``committed`` waits for the disk."""
        offset = self._clock.unix() - self._clock.now()
        row = row_of(self._next_n, task, self._clock, self.boot)
        accept = Accept(row, request_of(task, model_digest, offset))
        self._next_n += 1
        entry = self._add(task, accept)
        if not self.window_ms:
            self._undecided[entry.n] = entry
            if self._looks_at is None:
                self._look_later(COMMIT_WAIT_S)
        if row.idempotency_key is not None:
            self._by_name[row.key, row.idempotency_key] = entry
            entry.committed.add_done_callback(lambda _: self._forget_name(row, entry))
        self.writer.put(accept)

    def adopt(self, task: Task, accept: Accept, tokens: int) -> None:
        """Continue a task that an earlier process accepted, with ``tokens`` already written."""
        entry = self._add(task, accept)
        entry.committed.set_result(None)
        entry.tokens = tokens

    async def committed(self, task: Task) -> None:
        """Wait for an accepted task's commit. Raises ``JournalUnavailable`` or ``Draining``."""
        entry = task.entry
        assert entry is not None
        if self.window_ms:
            return
        try:
            await asyncio.shield(entry.committed)
        except TidegateError:
            self.refuse(task)
            raise

    def _look_later(self, wait_s: float) -> None:
        self._looks_at = asyncio.get_running_loop().call_later(wait_s, self._give_up)

    def _give_up(self) -> None:
        self._looks_at = None
        now = asyncio.get_running_loop().time()
        for n, entry in list(self._undecided.items()):
            left_s = entry.begun + COMMIT_WAIT_S - now
            if left_s > 0:
                self._look_later(left_s)
                return
            del self._undecided[n]
            entry.decide(f"the disk did not take it within {COMMIT_WAIT_S:g} s")

    def refuse(self, task: Task) -> None:
        """Mark a task that was never accepted: its end frees its submission's name."""
        entry = task.entry
        assert entry is not None
        entry.is_refused = True
        if entry.accept is not None:
            self._forget_name(entry.accept.row, entry)

    def _forget_name(self, row: TaskRow, entry: Entry) -> None:
        name = (row.key, row.idempotency_key or "")
        if self._by_name.get(name) is entry:
            del self._by_name[name]

    def check_owned(self) -> None:
        """Call ``on_lost`` for each live task that another orchestrator took over."""
        for entry in self._live.values():
            self.writer.put(Tokens(entry.n, entry.tokens, StoredTokens(b"", [])))

    def flush(self) -> None:
        """Pass new tokens of running tasks to the writer; call it about every 250 ms."""
        stuck_s = self.writer.stuck_s
        if stuck_s > COMMIT_WAIT_S:
            self._set_fault(f"the disk has taken nothing for {stuck_s:.0f} s")
            for entry in list(self._ending.values()):
                entry.recorded()
        if self.fault:
            return
        for entry in self._live.values():
            self._flush(entry)

    def _flush(self, entry: Entry) -> None:
        transcript, first = entry.task.transcript, entry.tokens
        if transcript is None or not entry.keeps_tokens or len(transcript.ids) <= first:
            return
        ids, texts = transcript.ids[first:], transcript.texts[first:]
        entry.tokens += len(ids)
        spent_s = entry.task.time_spent.seconds(self._clock.now())
        self.writer.put(Tokens(entry.n, first, StoredTokens(pack_ids(ids), texts, spent_s)))

    def leave(self, task: Task) -> bool:
        """Leave a task to the next process: its end here is not recorded, and its followers get no
        end. False if it is not durable (yet)."""
        entry = task.entry
        if entry is None or entry.n not in self._live:
            return False
        if not entry.committed.done() and not self.window_ms:  # it is not accepted yet
            self.refuse(task)
            entry.refuse(Draining("the service is shutting down; try again elsewhere"))
            return False
        del self._live[entry.n]
        self._flush(entry)
        entry.is_left = True
        self._left.append(entry)
        return True

    def take_back(self) -> list[tuple[Task, UnfinishedTask]]:
        """Take back tasks that were left to the next process, because this one continues. Returns
        each previous task with its unfinished form."""
        left, self._left = self._left, []
        now = self._clock.now()
        return [(entry.task, entry.unfinished(now)) for entry in left]

    def _add(self, task: Task, accept: Accept) -> Entry:
        entry = Entry(accept.row.n, task, accept)
        self._live[entry.n] = entry
        task.entry = entry
        task.on_end.append(self._ended)
        return entry

    def _ended(self, task: Task) -> None:
        entry = task.entry
        assert entry is not None
        if entry.is_left:
            return
        del self._live[entry.n]
        entry.accept = None
        if not entry.committed.done():  # its client waits for the disk until its deadline (OR-26)
            late = DeadlineExceeded.before("the task was on disk", 0.0)
            left_s = min(COMMIT_WAIT_S, max(0.0, task.deadline.at - self._clock.now()))
            asyncio.get_running_loop().call_later(left_s, entry.refuse, late)
        ended_unix, is_accepted = self._clock.unix(), not entry.is_refused
        result = result_of(task)
        self.writer.put(Ended(entry.n, ended_unix, task.completion_tokens, result, is_accepted))
        self._ending[entry.n] = entry
        if self.fault or self.window_ms:
            entry.recorded()

    # ── looking up ───────────────────────────────────────────────────────────────────────────

    async def submission(self, key: str, idempotency_key: str) -> Task | None:
        """The task of a submission with that name that is being written; waits for the write. None
        if there is none. Raises the errors of ``committed``."""
        entry = self._by_name.get((key, idempotency_key))
        if entry is None:
            return None
        await self.committed(entry.task)
        return entry.task

    def ending(self, task_id: str) -> Task | None:
        """A task that has just ended and whose end is not in the file yet; otherwise None."""
        entries = self._ending.values()
        return next((entry.task for entry in entries if entry.task.id == task_id), None)

    async def find(self, question: Question) -> Found | None:
        return await self._reader.find(question)

    # ── from the writer's thread ─────────────────────────────────────────────────────────────

    def _to_begin_with(self) -> list[Accept]:
        """The tasks to write into a new file; the next ``flush`` writes their tokens."""
        self._call(self._write_tokens_anew)
        live = list(self._live.values())
        return [entry.accept for entry in live if entry.accept is not None]

    def _write_tokens_anew(self) -> None:
        for entry in self._live.values():
            entry.tokens = 0

    def _call(self, function: Callable[[*Ts], None], *values: *Ts) -> None:
        assert self._loop is not None
        with suppress(RuntimeError):  # the loop has already ended
            self._loop.call_soon_threadsafe(function, *values)

    def _written(self, batch: Batch) -> None:
        self._set_fault(batch.fault)
        if not batch.fault:
            self.commits += 1
        for n in batch.lost:
            self._lose(n)
        for one in batch.operations:
            if isinstance(one, Ended):
                if one.n not in batch.lost:
                    self._ending.pop(one.n).recorded()
            elif isinstance(one, Accept):
                self._undecided.pop(one.row.n, None)
                entry = self._live.get(one.row.n) or self._ending.get(one.row.n)
                if entry is not None and one.row.n in batch.named_elsewhere:
                    entry.refuse(KeyInUse(_NAMED_ELSEWHERE))
                elif entry is not None:
                    entry.decide(batch.fault)
            elif batch.fault and (entry := self._live.get(one.n)):
                entry.tokens = min(entry.tokens, one.first)  # write these and later ones again

    def _lose(self, n: int) -> None:
        """Drop a task that another orchestrator took over: its followers ask there."""
        entry = self._live.pop(n, None)
        ending = self._ending.pop(n, None)
        if entry is not None:
            entry.is_left = True
            self.lost += 1
            self.on_lost(entry.task)
        elif ending is not None:
            ending.is_left = True
            self.outdone += 1
            self.on_outdone(ending.task)
            ending.recorded()

    def _set_fault(self, fault: str) -> None:
        if fault != self.fault:
            self.fault = fault
            self.on_fault()
