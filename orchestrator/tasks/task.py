"""A request for text as a task, which moves through the stages of ``work`` and ends exactly once.

Everything here runs on the event loop's thread and never waits.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from sys import getsizeof
from typing import TYPE_CHECKING, ClassVar, Protocol

from orchestrator.clock import Clock
from orchestrator.retention import KeptStore, Retention
from orchestrator.tasks.deadline import NO_PARTS, Part
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.image import Image
from orchestrator.tasks.job import Job, OnDisconnect, Priority
from orchestrator.tasks.prompt_kind import ANY_KIND
from orchestrator.tasks.time_spent import Phase, TimeSpent
from orchestrator.tasks.transcript import TASK_BYTES, Transcript
from orchestrator.tasks.work import Stage, WorkItem
from orchestrator.telemetry.log import fields, service_log
from protocol import Adapter, Delta, Feature, PromptLogprobs

if TYPE_CHECKING:
    from orchestrator.tasks.journal.durable import Entry
    from orchestrator.tasks.spans import TaskSpans


_BIAS_BYTES = 128
_NO_FEATURES: frozenset[Feature] = frozenset()


class Listener(Protocol):
    """Hears what happens to one task, in order, synchronously. Must neither wait nor raise."""

    def started(self, task: "Task") -> None:
        """The worker began; comes at most once, before any token."""

    def tokens(self, task: "Task", delta: Delta) -> None:
        """New tokens came. ``task.completion_tokens`` already includes them."""

    def ended(self, task: "Task") -> None:
        """The task has ended, and ``task.ending`` is set; nothing follows."""


class Abandonable(Protocol):
    """A task's job on a worker, as the task sees it."""

    def prompt_computed(self) -> None:
        """Note that the first token has come."""

    def abandon(self, ending: Ending) -> None:
        """Stop the job, because the task has ended without the worker; count what still comes."""


@dataclass(frozen=True, slots=True)
class EarlierText:
    """Text that an earlier process had generated for a task, and may have sent to its client."""

    ids: list[int]
    texts: list[str]
    differs: Callable[[], None]
    """Ends the task, because the text that is made again is not the same."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A lost attempt: its lane was cut, or its worker hangs or died; which one, mostly shows
    later."""

    address: str
    process_id: str
    """Id of the worker's process (``ModelCard.process_id``)."""
    at: float
    """When it was lost, in seconds of the clock."""
    is_death: bool = False
    """Whether the worker itself said that its engine had failed as a whole."""


class Task(WorkItem[Job, Listener]):
    """One offered request for text."""

    what: ClassVar[str] = "task"

    __slots__ = (
        "adapter",
        "attempt",
        "begun_by_weights",
        "between_calls_ms",
        "block_tokens",
        "cache_salt",
        "cached_tokens",
        "calls_left",
        "chance",
        "completion_tokens",
        "earlier",
        "entry",
        "features",
        "first_id_free",
        "fitted_tokens",
        "given_chance",
        "hedge",
        "images",
        "is_background",
        "is_promised",
        "is_resumable",
        "is_text_removed",
        "is_unread",
        "late_part",
        "leader_id",
        "likely_cached",
        "losses",
        "most_rows",
        "needs_continue",
        "paused_at",
        "paused_on",
        "pauses",
        "prefix_hashes",
        "prompt_kind",
        "prompt_logprobs",
        "prompt_ready_at",
        "prompt_tokens",
        "rank",
        "reserved_chance",
        "sampling",
        "spans",
        "time_spent",
        "token_ids",
        "transcript",
        "vocabulary",
        "work_ms",
    )

    def __init__(self, task_id: str, job: Job) -> None:
        super().__init__(task_id, job, job.parts)
        self.leader_id = task_id
        """Id of the first choice of a request, which the answer is called by."""
        self.late_part: Part | None = None
        """The first part of the answer that came too late (DL-14)."""
        self.calls_left: float = job.calls_left or 0
        """Later calls that must fit before its deadline, too: stated by its client or expected
        (``run_lengths``)."""
        self.between_calls_ms = 0.0
        """Ms that are expected to pass between these calls, in all."""
        self.time_spent = TimeSpent(job.arrived)
        self.adapter: Adapter | None = None
        """The model's LoRA adapter that was asked for by its name; None for the model itself."""
        self.vocabulary = b""
        self.features: frozenset[Feature] = _NO_FEATURES
        """Features that its engine must have; known once it was admitted."""
        self.cache_salt = ""
        """Prompts share cached prefixes with those of the same salt (``prefix_salt``)."""
        self.sampling = job.sampling
        self.token_ids: Sequence[int] = ()
        """Token ids of the prompt; dropped when the task ends."""
        self.images: Sequence[Image] = ()
        """The prompt's images, for which ``token_ids`` have the places; dropped likewise."""
        self.prompt_tokens = 0
        self.prompt_kind = ANY_KIND
        self.cached_tokens = 0
        """Prompt tokens that its worker found in the prefix cache; known at the end."""
        self.likely_cached = 0
        """Prompt tokens that an instance's prefix cache held when the task came or was sent, or as
        its worker said with the first token."""
        self.prefix_hashes: Sequence[bytes] = ()
        """Hashes of the prompt's full KV blocks, of ``block_tokens`` each; empty if no instance
        caches."""
        self.block_tokens = 0
        self.work_ms = 0.0
        """Plan: time of an engine that the task will probably take, in ms."""
        self.chance = 1.0
        """Plan: chance (0 to 1) of being in time, if it ran now."""
        self.rank = job.deadline.at
        """Plan: its place among those that wait, the smallest first."""
        self.most_rows = math.inf
        """Rows among which it was let in: its instance may run no more until it has ended."""
        self.is_background = False
        """Plan: whether it only gets free slots that no other task wants."""
        self.is_promised = False
        """Whether we named its deadline as feasible, so that it goes first."""
        self.reserved_chance: float | None = None
        """The chance with which its deadline was reserved (``prediction.quotes``); None if it was
        not."""
        self.is_unread = False
        """Whether its client is behind with reading: others may have its slot until it reads
        again."""
        self.paused_on = ""
        """The instance that keeps its KV while it is paused; empty if it is not."""
        self.paused_at = 0.0
        self.pauses = 0
        self.prompt_ready_at = 0.0
        """When its prompt will probably be computed; 0 while no worker has it."""
        self.fitted_tokens: int | None = None
        """The value that ``max_tokens`` was reduced to, to fit the deadline (DL-6); None if it was
        not."""
        self.given_chance: float | None = None
        """The chance (0 to 1) of being in time that it had when it was first sent to a worker."""
        self.losses: list[Loss] = []
        self.is_resumable = False
        """Whether another instance could continue what it has generated, which ``transcript``
        keeps."""
        self.begun_by_weights: str | None = None
        """Digest of the weights that its text continues with; None if it cannot be continued
        anywhere."""
        self.needs_continue = False
        """Whether only workers that can take up any text can continue it."""
        self.completion_tokens = 0
        self.prompt_logprobs: list[PromptLogprobs] = []
        """Log-probabilities in the order of the prompt, for those that ask for them; complete with
        the first token, or at the end of a task that has none."""
        self.transcript: Transcript | None = None
        self.earlier: EarlierText | None = None
        """An earlier process's text, until ``restore``, or until all of it was made again and is
        the same."""
        self.attempt: Abandonable | None = None
        self.hedge: Abandonable | None = None
        """A second job for the same task, until one of the two has a token."""
        self.spans: TaskSpans | None = None
        self.entry: Entry | None = None
        """Place of the task in the journal; None for most tasks."""
        self.first_id_free = 0
        """A number below which all event numbers lie that an earlier process has sent."""
        self.is_text_removed = False
        """Whether it ended so long ago that its text is no longer kept."""

    @property
    def served_name(self) -> str:
        return self.model if self.adapter is None else self.adapter.name

    @property
    def new_prompt_tokens(self) -> int:
        """Prompt tokens that will probably have to be computed, because they are not cached."""
        return self.prompt_tokens - self.likely_cached

    def prompt_tokens_in(self, blocks: int) -> int:
        """How many of the prompt's tokens ``blocks`` cached KV blocks spare; never all of them."""
        return max(0, min(self.prompt_tokens - 1, self.block_tokens * blocks))

    @property
    def priority(self) -> Priority:
        return self.job.priority

    @property
    def tenant(self) -> str:
        return self.job.tenant

    @property
    def holds_place(self) -> bool:
        """Whether it keeps its place in the queue: it is durable and accepted, has begun, or
        belongs to the refusal sample."""
        return self.job.durable or self.refusal_sample or bool(self.paused_on or self.marks.started)

    @property
    def kept_bytes(self) -> int:
        """Approximate memory that keeping this takes, in bytes, with what its client stated."""
        job = self.job
        stated = sum(map(getsizeof, (*job.sampling.stop, *job.placement.instances)))
        stated += _BIAS_BYTES * len(job.sampling.logit_bias)
        stated += sum(read.kept_bytes for read in self.prompt_logprobs)
        return TASK_BYTES + stated + (self.transcript.kept_bytes if self.transcript else 0)

    @property
    def has_text(self) -> bool:
        """Whether a client that accepts a partial answer gets anything."""
        return self.completion_tokens > 0 or self.earlier is not None

    def missed_at(self, now: float) -> Part | None:
        """The missed part of a text that ends well at ``now``; None without one."""
        if self.late_part is None and not self.completion_tokens:
            return Part.FIRST_TOKEN if now > self.parts.first_token_at else None
        return self.late_part

    def record(self, *, keeps_logprobs: bool = True) -> Transcript:
        """Keep the task's output; call it before the first token. Log-probabilities, which take
        most memory, are kept only on request.
        """
        if self.transcript is None:
            self.transcript = Transcript()
            self.transcript.keeps_logprobs = keeps_logprobs
            self.listeners = [self.transcript, *self.listeners]
        self.transcript.keeps_logprobs |= keeps_logprobs
        return self.transcript

    def begin(self, now: float, wait_ms: float) -> None:
        if self.stage is not Stage.DISPATCHED:
            return
        self.stage = Stage.RUNNING
        self.time_spent.started(now, wait_ms)
        if self.completion_tokens:
            return  # it continues where another instance stopped
        is_first = not self.marks.started
        self.marks.started = now
        if not is_first:
            return
        for listener in self.listeners:
            listener.started(self)

    def deliver(self, delta: Delta, now: float) -> None:
        """Take tokens from the worker. The hot path: everything here is paid per frame and task."""
        if self.earlier is not None and not self._repeats(self.earlier, delta):
            return
        if not self.completion_tokens:
            self.begin(now, 0.0)  # has happened already, unless the worker forgot to say so
            # A frame's time is taken when it comes, a moment before its ``started`` is reported.
            self.marks.first_token = max(now, self.marks.started)
            if now > self.parts.first_token_at:
                self.late_part = Part.FIRST_TOKEN
            if self.attempt is not None:
                self.attempt.prompt_computed()
        if self.time_spent.phase < Phase.DECODE:
            self.time_spent.token(now)
        self.completion_tokens += len(delta.ids)
        if (
            self.parts is not NO_PARTS
            and self.late_part is None
            and now > self.parts.due_at(self.completion_tokens, self.marks.first_token)
        ):
            self.late_part = Part.TOKEN_GAP
        for listener in self.listeners:
            listener.tokens(self, delta)

    def share_ms(self, now: float) -> float:
        """This call's share in ms of the time until its deadline (``share_of``)."""
        return self.share_of(self.deadline.left_ms(now))

    def share_of(self, ms: float) -> float:
        """Ms that this call may take of ``ms``: an equal part with each call that is to come, of
        the time that does not pass between them; that is half of it at most."""
        return (ms - min(self.between_calls_ms, ms / 2)) / (1 + self.calls_left)

    def restore(self) -> None:
        """Make an earlier process's text the task's, as far as it was not generated again;
        listeners get it like any text. No effect without one."""
        earlier, self.earlier = self.earlier, None
        if earlier is None or (self.transcript is not None and self.transcript.logprobs):
            return  # log-probabilities are not journalled, and a text has all of them or none
        self.record()
        first, marks = self.completion_tokens, self.marks
        is_started, marks.started = bool(marks.started), marks.started or marks.received or -1.0
        marks.first_token = marks.first_token or marks.started
        self.completion_tokens = len(earlier.ids)
        delta = Delta(-1, earlier.ids[first:], earlier.texts[first:])
        for listener in self.listeners:
            try:
                if not is_started:
                    listener.started(self)
                listener.tokens(self, delta)
            except Exception:  # must not cost the task its end, which may be next
                service_log.exception(
                    "a listener failed at the earlier text of a task",
                    extra=fields(task_id=self.id, correlation_id=self.correlation_id),
                )

    def _repeats(self, earlier: EarlierText, delta: Delta) -> bool:
        """Whether new tokens are those of the earlier text; if not, the task ends."""
        first, end = self.completion_tokens, self.completion_tokens + len(delta.ids)
        known = earlier.ids[first:end]
        if delta.ids[: len(known)] != known:
            earlier.differs()
            return False
        if end >= len(earlier.ids):
            self.earlier = None
        return True

    def deliver_prompt(self, logprobs: PromptLogprobs) -> None:
        """Take the worker's log-probabilities of the prompt; after a retry they begin again."""
        if logprobs.first == 1:
            self.prompt_logprobs = []
        self.prompt_logprobs.append(logprobs)

    def _release(self, ending: Ending) -> None:
        self.token_ids = ()
        self.images = ()
        self.prefix_hashes = ()
        attempts, self.attempt, self.hedge = (self.attempt, self.hedge), None, None
        for attempt in attempts:
            if attempt is not None:
                attempt.abandon(ending)


class TaskStore(KeptStore[Task]):
    """Tasks by id, with all that they produced (``Task.kept_bytes``)."""

    def __init__(self, clock: Clock, retention: Retention) -> None:
        super().__init__(clock, retention, "task")

    def add(self, task: Task) -> None:
        """Keep a task, with all that it will produce."""
        task.record()
        super().add(task)

    def is_awaited(self, task: Task) -> bool:
        """Whether its client may come back for it. The next process has a durable one."""
        return task.entry is None and task.job.on_disconnect is OnDisconnect.CONTINUE
