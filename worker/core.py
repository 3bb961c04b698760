"""The types that go into an engine and come out of it, and its interface. No torch.

Threads: an engine runs on one thread of its own. ``submit``, ``cancel``, ``pause``, ``resume`` and
``stats`` may be called from any thread; events are handed to the sink on the engine's thread, in
batches.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import msgspec

from protocol import (
    AbortCause,
    Code,
    FinishReason,
    KvReport,
    OnDeadline,
    PromptLogprobs,
    Sampling,
    TokenLogprob,
    WorkerStats,
)
from worker.grammar.constraint import Constraint

Clock = Callable[[], float]
"""A clock of monotonic seconds, passed in so that the engine runs under a simulated one too."""


@dataclass(slots=True, eq=False)
class Job:
    """One generation asked of the engine.

    ``deadline`` is on the engine's clock (``math.inf`` when there is none). ``cache_salt`` and
    ``session`` are those of ``Submit``; the session's KV is kept for ``session_keep_s`` after the
    job. ``first_token_by``, ``due_by`` (on the engine's clock) and ``token_gap_s`` order and size
    the work; no job ends because of them. A job that ``keeps_on`` is not ended before its deadline.
    One with a ``constraint`` starts when that is ready. ``abort`` is a flag that the engine checks
    in every step (DL-4); ``Engine.cancel`` sets it.
    """

    token_ids: Sequence[int]
    sampling: Sampling
    deadline: float
    on_deadline: OnDeadline = OnDeadline.ERROR
    correlation_id: str = ""
    cache_salt: str = ""
    session: str = ""
    session_keep_s: float = 0.0
    first_token_by: float = math.inf
    token_gap_s: float = math.inf
    due_by: float = math.inf
    keeps_on: bool = False
    constraint: Constraint | None = None
    begun_tokens: int = 0
    """How many of the last ``token_ids`` belong to the answer: another worker generated them."""
    expected_tokens: int = 0
    """Tokens that nine in ten jobs like this do not exceed; 0 where that is unknown."""
    images: Sequence[bytes] = ()
    """Files of the prompt's images, in their order; ``token_ids`` have the places for them."""
    adapter: str = ""
    """Name of the LoRA adapter that computes it; empty for the model alone."""
    abort: AbortCause | None = None
    aborted_at: float = 0.0
    pause_requested: bool = False
    """Whether to pause the job; set by ``Engine.pause`` and ``resume``, read each step."""
    has_started: bool = False
    """Set by the engine before the job's first step; ``JobStarted`` comes after that step."""


@dataclass(slots=True, frozen=True)
class JobStarted:
    """The job was admitted to the running batch; its KV blocks are reserved to completion."""

    job: Job
    wait_ms: float


class JobTokens(msgspec.Struct, frozen=True, gc=False):
    """Tokens that one step produced for a job, usually one; ``logprobs`` is parallel to ``ids``.

    Made for every row of every step: as a frozen dataclass it took 15 times as long to make.
    """

    job: Job
    ids: list[int]
    logprobs: list[TokenLogprob] | None
    cached_tokens: int | None = None
    """With a job's first tokens: how many of its prompt the prefix cache had."""


@dataclass(slots=True, frozen=True)
class JobPrompt:
    """Log-probabilities of the prompt's next tokens: one or more for each step that read any."""

    job: Job
    logprobs: PromptLogprobs


@dataclass(slots=True, frozen=True)
class JobPaused:
    """The job is paused from here on; one that was started keeps its KV blocks."""

    job: Job


@dataclass(slots=True, frozen=True)
class JobResumed:
    """A paused job resumes: it has a slot again, or waits for its first one like others."""

    job: Job


@dataclass(slots=True, frozen=True)
class JobFinished:
    """The last event of a job. Its slot and blocks are free already.

    ``abort_ms`` is from the engine's first sight of the abort or deadline to that point.
    """

    job: Job
    reason: FinishReason
    code: Code | None
    message: str
    prompt_tokens: int
    completion_tokens: int = 0
    late_tokens: int = 0
    wait_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    left_ms: float = 0.0
    abort_ms: float | None = None
    cached_tokens: int = 0
    spared: bool = False


Event = JobStarted | JobPrompt | JobTokens | JobPaused | JobResumed | JobFinished
EventSink = Callable[[list[Event]], None]


class StepUnderWay(NamedTuple):
    """The step that an engine's thread is computing. ``began_at`` is on the engine's clock;
    ``usual_s`` is what a slow step of that kind takes, in seconds, 0 until one is measured."""

    began_at: float
    usual_s: float


class EngineService(Protocol):
    """The engine's whole surface."""

    def start(self, sink: EventSink) -> None:
        """Start the engine's thread. ``sink`` gets each step's events and must not block long."""

    def submit(self, job: Job) -> None:
        """Queue a job. Never blocks, never raises: a refusal is a ``JobFinished`` event."""

    def cancel(self, job: Job, cause: AbortCause) -> None:
        """Stop a job within one step. Idempotent; the first cause wins."""

    def pause(self, job: Job) -> None:
        """Pause a job after the current step; its KV is kept, and deadline and abort still count.
        Idempotent."""

    def resume(self, job: Job) -> None:
        """Resume a paused job, before any that waits to start. Idempotent."""

    def stats(self) -> WorkerStats:
        """The state after a recent step, without ``lanes``, which the engine does not know."""

    def kv_reports(self) -> list[KvReport]:
        """Reports of what entered and left the prefix cache since the last call. For one reader."""

    @property
    def has_failed(self) -> bool:
        """Whether the engine's thread has ended by an error: it computes no more, refuses all."""

    @property
    def step_under_way(self) -> StepUnderWay | None:
        """The step being computed, None between steps. Any thread; to see if the engine hangs."""

    def stop(self) -> None:
        """Abort all jobs, release everything, end the thread. Idempotent."""
