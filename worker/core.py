"""An engine's input and output types, and its interface. No torch.

Threads: an engine runs on its own thread. Any thread may call ``submit``, ``cancel``, ``pause``,
``resume`` and ``stats``. The engine's thread passes events to the sink, in batches.
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
"""A clock of monotonic seconds, passed in so that the engine also runs on a simulated one."""


@dataclass(slots=True, eq=False)
class Job:
    """One generation that the engine is asked to do.

    ``deadline`` is on the engine's clock (``math.inf`` if there is none). ``cache_salt`` and
    ``session`` are those of ``Submit``; the session's KV is kept for ``session_keep_s`` after the
    job. ``first_token_by``, ``due_by`` (on the engine's clock) and ``token_gap_s`` determine the
    order and size of work; no job ends because of them. A job with ``keeps_on`` never ends before
    its deadline. A job with a ``constraint`` starts once that is ready. ``abort`` is a flag that
    the engine checks in every step (DL-4); ``Engine.cancel`` sets it.
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
    """Number of the last ``token_ids`` that belong to the answer: another worker generated them."""
    expected_tokens: int = 0
    """Number of tokens that nine in ten such jobs do not exceed; 0 if unknown."""
    images: Sequence[bytes] = ()
    """Files of the prompt's images, in order; ``token_ids`` has the image tokens for them."""
    adapter: str = ""
    """Name of the job's LoRA adapter; empty for the model alone."""
    abort: AbortCause | None = None
    aborted_at: float = 0.0
    pause_requested: bool = False
    """Whether to pause the job; set by ``Engine.pause`` and ``resume``, read each step."""
    has_started: bool = False
    """Set by the engine before the job's first step; ``JobStarted`` comes after that step."""


@dataclass(slots=True, frozen=True)
class JobStarted:
    """The job was admitted to the running batch; its KV blocks are reserved until it completes."""

    job: Job
    wait_ms: float


class JobTokens(msgspec.Struct, frozen=True, gc=False):
    """Tokens that one step produced for a job, usually one; ``logprobs`` is parallel to ``ids``.

    Created for every row of every step: a frozen dataclass took 15 times as long to create.
    """

    job: Job
    ids: list[int]
    logprobs: list[TokenLogprob] | None
    cached_tokens: int | None = None
    """With a job's first tokens: number of its prompt tokens in the prefix cache."""


@dataclass(slots=True, frozen=True)
class JobPrompt:
    """Log-probabilities of the prompt's next tokens: one or more events per step that reads any."""

    job: Job
    logprobs: PromptLogprobs


@dataclass(slots=True, frozen=True)
class JobPaused:
    """The job is paused from now on; a job that has started keeps its KV blocks."""

    job: Job


@dataclass(slots=True, frozen=True)
class JobResumed:
    """A paused job resumes: it has a slot again, or waits for its first slot like other jobs."""

    job: Job


@dataclass(slots=True, frozen=True)
class JobFinished:
    """The last event of a job. Its slot and blocks are already free.

    ``abort_ms``: milliseconds from when the engine first saw the abort or deadline until then.
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
    ``usual_s`` is the time of a slow step of that kind, in seconds; 0 until one is measured."""

    began_at: float
    usual_s: float


class EngineService(Protocol):
    """The engine's complete interface."""

    def start(self, sink: EventSink) -> None:
        """Start the engine's thread. ``sink`` gets each step's events and must not block long."""

    def submit(self, job: Job) -> None:
        """Queue a job. Never blocks, never raises: a refusal is a ``JobFinished`` event."""

    def cancel(self, job: Job, cause: AbortCause) -> None:
        """Stop a job within one step. Idempotent; the first cause wins."""

    def pause(self, job: Job) -> None:
        """Pause a job after the current step. Its KV is kept; deadline and abort still apply.
        Idempotent; ignored if jobs cannot be paused."""

    def resume(self, job: Job) -> None:
        """Resume a paused job before any job that waits to start. Idempotent."""

    def stats(self) -> WorkerStats:
        """The state after a recent step, without ``lanes``, which the engine does not know."""

    def kv_report(self) -> KvReport | None:
        """The prefix cache's changes since the last call, if any. For one reader."""

    @property
    def has_failed(self) -> bool:
        """Whether an error has ended the engine's thread: the engine refuses all jobs."""

    @property
    def step_under_way(self) -> StepUnderWay | None:
        """The current step; None between steps. Any thread may call it, to detect a hang."""

    def stop(self) -> None:
        """Abort all jobs, release everything, end the thread. Idempotent."""
