"""A text request as a task. It moves through the stages of ``work`` and ends exactly once.

Everything here runs on the event loop's thread and never waits.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from sys import getsizeof
from typing import TYPE_CHECKING, ClassVar, Protocol

from orchestrator.clock import Clock
from orchestrator.retention import KeptStore, Retention
from orchestrator.tasks.deadline import NO_PARTS, Part
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.image import Image
from orchestrator.tasks.job import Job, OnDisconnect, Priority
from orchestrator.tasks.prompt_kind import ANY_KIND, PromptKind
from orchestrator.tasks.time_spent import Phase, TimeSpent
from orchestrator.tasks.transcript import TASK_BYTES, Transcript
from orchestrator.tasks.work import Stage, WorkItem
from orchestrator.telemetry.log import fields, service_log
from protocol import Adapter, Delta, Feature, PromptLogprobs, Sampling

if TYPE_CHECKING:
    from orchestrator.tasks.journal.durable import Entry
    from orchestrator.tasks.spans import TaskSpans


_BIAS_BYTES = 128


class Listener(Protocol):
    """Receives the events of one task, in order and synchronously. Must neither wait nor raise."""

    def started(self, task: "Task") -> None:
        """The worker has started; called at most once, before any token."""

    def tokens(self, task: "Task", delta: Delta) -> None:
        """New tokens arrived; ``task.completion_tokens`` already includes them."""

    def ended(self, task: "Task") -> None:
        """The task has ended and ``task.ending`` is set; the last event."""


class Abandonable(Protocol):
    """A task's job on a worker, as the task sees it."""

    def prompt_computed(self) -> None:
        """Record that the first token has arrived."""

    def abandon(self, ending: Ending) -> None:
        """Stop the job, because the task has ended without the worker; count late tokens."""


@dataclass(frozen=True, slots=True)
class EarlierText:
    """A task's text from an earlier process, which may have sent it to the client."""

    ids: list[int]
    texts: list[str]
    differs: Callable[[], None]
    """Ends the task because the regenerated text is different."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A lost attempt: its lane was cut, or its worker hangs or died. Which one is mostly known only
    later."""

    address: str
    process_id: str
    """Id of the worker's process (``ModelCard.process_id``)."""
    at: float
    """When it was lost, in seconds of the clock."""
    is_death: bool = False
    """Whether the worker itself reported that its whole engine failed."""


@dataclass(slots=True, eq=False, repr=False)
class Task(WorkItem[Job, Listener]):
    """One submitted text request."""

    what: ClassVar[str] = "task"

    leader_id: str = field(init=False)
    """Id of the first choice of the request; the answer has this id."""
    late_part: Part | None = None
    """The first part of the answer that came too late (DL-14)."""
    calls_left: float = field(init=False)
    """Number of later calls that must also fit before its deadline: stated by its client or
    expected (``run_lengths``)."""
    between_calls_ms: float = 0.0
    """Expected total ms between these calls."""
    time_spent: TimeSpent = field(init=False)
    adapter: Adapter | None = None
    """The model's LoRA adapter that the client named; None for the model itself."""
    vocabulary: bytes = b""
    features: frozenset[Feature] = frozenset()
    """Features that its engine must have; known after admission."""
    cache_salt: str = ""
    """Only prompts with the same salt share cached prefixes (``prefix_salt``)."""
    sampling: Sampling = field(init=False)
    token_ids: Sequence[int] = ()
    """Token ids of the prompt; dropped when the task ends."""
    images: Sequence[Image] = ()
    """The prompt's images, with placeholders in ``token_ids``; also dropped at the end."""
    prompt_tokens: int = 0
    prompt_kind: PromptKind = ANY_KIND
    cached_tokens: int = 0
    """Number of prompt tokens that its worker found in the prefix cache; known at the end."""
    likely_cached: int = 0
    """Number of prompt tokens in an instance's prefix cache: when the task arrived or was sent,
    or as its worker reported with the first token."""
    prefix_hashes: Sequence[bytes] = ()
    """Hashes of the prompt's full KV blocks of ``block_tokens`` tokens; empty if no instance
    caches."""
    block_tokens: int = 0
    work_ms: float = 0.0
    """Plan: expected engine time of the task, in ms."""
    chance: float = 1.0
    """Plan: chance (0 to 1) of being in time if it starts now."""
    rank: float = field(init=False)
    """Plan: its place among waiting tasks, smallest first."""
    most_rows: float = math.inf
    """Most rows that its instance may run until it ends: a condition of its admission."""
    is_background: bool = False
    """Plan: whether it gets only free slots that no other task wants."""
    is_promised: bool = False
    """Whether the service promised its deadline, so that it goes first."""
    reserved_chance: float | None = None
    """The chance of its reserved deadline (``prediction.quotes``); None if it was not
    reserved."""
    is_unread: bool = False
    """Whether its client has fallen behind: others may use its slot until the client reads
    again."""
    paused_on: str = ""
    """The instance that keeps its KV while it is paused; empty if not paused."""
    paused_at: float = 0.0
    pauses: int = 0
    prompt_ready_at: float = 0.0
    """Expected time at which its prompt is computed; 0 while no worker has it."""
    fitted_tokens: int | None = None
    """``max_tokens`` after its reduction to fit the deadline (DL-6); None if not reduced."""
    given_chance: float | None = None
    """Its chance (0 to 1) of being in time when it was first sent to a worker."""
    losses: list[Loss] = field(default_factory=list)
    is_resumable: bool = False
    """Whether another instance could continue its text, which ``transcript`` keeps."""
    begun_by_weights: str | None = None
    """Digest of the weights that can continue its text; None if no instance can."""
    needs_continue: bool = False
    """Whether only workers that can continue any text can continue it."""
    completion_tokens: int = 0
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    """Log-probabilities in the order of the prompt, if requested; complete at the first token,
    or at the end of a task without tokens."""
    transcript: Transcript | None = None
    earlier: EarlierText | None = None
    """An earlier process's text, until ``restore`` or until it was regenerated identically."""
    attempt: Abandonable | None = None
    spans: "TaskSpans | None" = None
    entry: "Entry | None" = None
    """The task's entry in the journal; None for most tasks."""
    first_id_free: int = 0
    """Upper bound (exclusive) of the event numbers that an earlier process sent."""
    is_text_removed: bool = False
    """Whether its text was removed because it ended long ago."""

    def __post_init__(self) -> None:
        WorkItem.__post_init__(self)  # ``super`` finds the class without slots
        job = self.job
        self.parts = job.parts
        self.leader_id = self.id
        self.calls_left = job.calls_left or 0
        self.time_spent = TimeSpent(job.arrived)
        self.sampling = job.sampling
        self.rank = job.deadline.at

    @property
    def served_name(self) -> str:
        return self.model if self.adapter is None else self.adapter.name

    @property
    def new_prompt_tokens(self) -> int:
        """Number of prompt tokens that are probably not cached and must be computed."""
        return self.prompt_tokens - self.likely_cached

    def prompt_tokens_in(self, blocks: int) -> int:
        """Number of prompt tokens that ``blocks`` cached KV blocks save; never all of them."""
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
        """Approximate memory of the kept task in bytes, including the client's parameters."""
        job = self.job
        stated = sum(map(getsizeof, (*job.sampling.stop, *job.placement.instances)))
        stated += _BIAS_BYTES * len(job.sampling.logit_bias)
        stated += sum(read.kept_bytes for read in self.prompt_logprobs)
        return TASK_BYTES + stated + (self.transcript.kept_bytes if self.transcript else 0)

    @property
    def has_text(self) -> bool:
        """Whether a client that accepts a partial answer gets any text."""
        return self.completion_tokens > 0 or self.earlier is not None

    def missed_at(self, now: float) -> Part | None:
        """The missed part of a text that ends well at ``now``; None if none was missed."""
        if self.late_part is None and not self.completion_tokens:
            return Part.FIRST_TOKEN if now > self.parts.first_token_at else None
        return self.late_part

    def record(self, *, keeps_logprobs: bool = True) -> Transcript:
        """Keep the task's output; call it before the first token. Log-probabilities take the most
        memory and are kept only on request.
        """
        if self.transcript is None:
            self.transcript = Transcript(keeps_logprobs=keeps_logprobs)
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
        """Accept tokens from the worker. The hot path: this runs for every frame and task."""
        if self.earlier is not None and not self._repeats(self.earlier, delta):
            return
        if not self.completion_tokens:
            self.begin(now, 0.0)  # usually already done, unless the worker did not report it
            # A frame's time is its arrival, a moment before its ``started`` is reported.
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
        """Ms of ``ms`` for this call: it and its later calls share equally the time that is not
        spent between calls, which is at most half of ``ms``."""
        return (ms - min(self.between_calls_ms, ms / 2)) / (1 + self.calls_left)

    def restore(self) -> None:
        """Add the part of an earlier process's text that was not regenerated; listeners get it like
        any text. No effect if there is none."""
        earlier, self.earlier = self.earlier, None
        if earlier is None or (self.transcript is not None and self.transcript.logprobs):
            return  # logprobs are not journaled, and a text has all or none
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
            except Exception:  # the task must still end, perhaps right after this
                service_log.exception(
                    "a listener failed on the earlier text of a task",
                    extra=fields(task_id=self.id, correlation_id=self.correlation_id),
                )

    def _repeats(self, earlier: EarlierText, delta: Delta) -> bool:
        """Whether new tokens match the earlier text; if not, the task ends."""
        first, end = self.completion_tokens, self.completion_tokens + len(delta.ids)
        known = earlier.ids[first:end]
        if delta.ids[: len(known)] != known:
            earlier.differs()
            return False
        if end >= len(earlier.ids):
            self.earlier = None
        return True

    def deliver_prompt(self, logprobs: PromptLogprobs) -> None:
        """Accept the worker's log-probabilities of the prompt; after a retry they start over."""
        if logprobs.first == 1:
            self.prompt_logprobs = []
        self.prompt_logprobs.append(logprobs)

    def _release(self, ending: Ending) -> None:
        self.token_ids = ()
        self.images = ()
        self.prefix_hashes = ()
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            attempt.abandon(ending)


class TaskStore(KeptStore[Task]):
    """Tasks by id, with all of their output (``Task.kept_bytes``)."""

    def __init__(self, clock: Clock, retention: Retention) -> None:
        super().__init__(clock, retention, "task")

    def add(self, task: Task) -> None:
        task.record()
        super().add(task)

    def is_awaited(self, task: Task) -> bool:
        """Whether its client may come back for it. The next process has durable tasks."""
        return task.entry is None and task.job.on_disconnect is OnDisconnect.CONTINUE
