"""Defines a lane: a connection to one instance that carries many jobs, in any protocol.

A kind of lane implements ``Lane``'s abstract methods and guarantees two things: each submitted job
ends with exactly one of ``JobSink.on_ended`` and ``on_lost``, and its owner gets ``lane_opened``
and ``lane_closed`` alternately. It reconnects by itself until it is closed.
"""

from abc import ABC, abstractmethod
from typing import Final, NotRequired, Protocol, TypedDict, Unpack

from orchestrator.clock import Clock
from orchestrator.errors import InstanceLost, TidegateError
from orchestrator.lanes.reconnector import Reconnector
from protocol import (
    AbortCause,
    Delta,
    End,
    Frame,
    Grammar,
    OnDeadline,
    PromptLogprobs,
    Sampling,
)

SAMPLE_EVERY: Final = 64
"""One of this many frames is timed from its decoding until its tokens are written (LB-8)."""


class JobSink(Protocol):
    """Receives one job's events. Called by the lane's reader: must neither wait nor raise."""

    def on_started(self, wait_ms: float) -> None:
        """The worker started the job, which had waited there for ``wait_ms``."""

    def on_cached(self, tokens: int) -> None:
        """The prefix cache had ``tokens`` tokens of the prompt; the answer begins now."""

    def on_prompt(self, logprobs: PromptLogprobs) -> None:
        """Log-probabilities of the prompt's next tokens arrived, for a job that requests them."""

    def on_tokens(self, delta: Delta, now: float) -> None:
        """The answer's next tokens arrived at ``now``, in seconds of the clock."""

    def on_paused(self) -> None:
        """The job is paused; ``on_resumed``, ``on_ended`` or ``on_lost`` follows."""

    def on_resumed(self) -> None:
        """The job runs again."""

    def on_ended(self, end: End) -> None:
        """The job's terminal record; nothing follows."""

    def on_lost(self, error: TidegateError) -> None:
        """The job is lost; nothing follows."""


class LaneOwner(Protocol):
    """Receives a lane's own state."""

    def lane_opened(self, lane: "Lane", first: Frame) -> None:
        """The lane is up. ``first`` carries the model card."""

    def lane_reported(self, lane: "Lane", frame: Frame) -> None:
        """A frame arrived with statistics, a drain, a new card or a prefix cache report."""

    def lane_closed(self, lane: "Lane", reason: str) -> None:
        """The lane is broken; its jobs are lost."""

    def emission_sampled(self, seconds: float, tokens: int) -> None:
        """A frame with ``tokens`` tokens took ``seconds`` to reach its clients' sockets."""


class JobFields(TypedDict):
    """The fields of a submitted job: those of ``Submit`` except its lane and handle."""

    token_ids: list[int]
    sampling: Sampling
    budget_ms: float
    deadline_unix_ms: int
    on_deadline: OnDeadline
    correlation_id: str
    cache_salt: NotRequired[str]
    session: NotRequired[str]
    first_token_budget_ms: NotRequired[float | None]
    token_gap_ms: NotRequired[float | None]
    keeps_on: NotRequired[bool]
    grammar: NotRequired[Grammar | None]
    begun_tokens: NotRequired[int]
    stop_after_tokens: NotRequired[int]
    expected_tokens: NotRequired[int]
    session_keep_ms: NotRequired[float]
    share_ms: NotRequired[float | None]
    serving: NotRequired[int]
    images: NotRequired[list[bytes]]
    adapter: NotRequired[str]


class Lane(ABC):
    """One lane to the instance at ``address``. ``handle`` numbers its jobs."""

    _sessions: Reconnector
    """Successive connections; each kind of lane creates it."""

    def __init__(self, address: str, owner: LaneOwner, clock: Clock) -> None:
        self.address = address
        self.is_open = False
        self.is_reopening = False
        """Whether it was closed as stale and no later connection attempt has failed."""
        self.is_closing = False
        """Whether Triton takes no new requests for the model; its jobs continue."""
        self.last_frame_at = clock.now()
        """When the peer last sent data, in seconds of the clock."""
        self.is_exhausted = False
        """Whether a new lane must replace this one, because it has carried enough data."""
        self.successor: Lane | None = None
        """The lane that takes new jobs when it is open; present jobs end on this lane."""
        self.tokens_total = 0
        self.frames_total = 0
        self.sessions_total = 0
        self.submitted_total = 0
        self._owner = owner
        self._clock = clock
        self._until_sample = SAMPLE_EVERY

    @property
    @abstractmethod
    def load(self) -> int:
        """Number of jobs on the instance."""

    @property
    def is_relieved(self) -> bool:
        return self.successor is not None and self.successor.is_open

    def take_over(self, replaced: "Lane") -> None:
        self.tokens_total += replaced.tokens_total
        self.frames_total += replaced.frames_total
        self.sessions_total += replaced.sessions_total
        self.submitted_total += replaced.submitted_total

    def silent_s(self, now: float) -> float:
        return now - self.last_frame_at

    # ── for callers with work ───────────────────────────────────────────────────────────────

    @abstractmethod
    def submit(self, sink: JobSink, **job: Unpack[JobFields]) -> int:
        """Send a job on an open lane; returns its handle."""

    @abstractmethod
    def cancel(self, handle: int, cause: AbortCause) -> None:
        """Stop a job within one engine step. Idempotent; its end is still reported."""

    def pause(self, handle: int) -> None:  # noqa: B027 - of no use for some kinds
        """Pause a job and keep its KV. Idempotent; for workers that ``can_pause``."""

    def resume(self, handle: int) -> None:  # noqa: B027 - of no use for some kinds
        """Resume a paused job. Idempotent."""

    # ── for its owner ────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        self._sessions.start()

    @abstractmethod
    async def close(self) -> None:
        """Close the lane permanently: the worker stops its running jobs. Idempotent."""

    def break_off(self, reason: str) -> None:
        """Drop this connection and open another."""
        self._sessions.break_off(reason)

    def reopen(self) -> None:  # noqa: B027 - of no use for some kinds
        """Reconnect, because another lane to this worker is stale."""

    @abstractmethod
    def describe(self) -> None:
        """Ask for the card and a full report of the prefix cache."""

    def probe(self) -> None:  # noqa: B027 - of no use for some kinds
        """Check that messages still arrive if no other traffic shows it; call it often."""

    # ── for kinds of lanes ───────────────────────────────────────────────────────────────────

    def _sample_emission(self, since: float, tokens: int) -> None:
        """Report the time of ``tokens`` from ``since`` to now, once in ``SAMPLE_EVERY`` calls."""
        self._until_sample -= 1
        if self._until_sample <= 0 and tokens:
            self._until_sample = SAMPLE_EVERY
            self._owner.emission_sampled(self._clock.now() - since, tokens)


def lost(why: str = "") -> InstanceLost:
    """The error of a job whose instance was lost."""
    said = f": {why}" if why else "; try again"
    return InstanceLost(f"the instance that worked on this was lost{said}")
