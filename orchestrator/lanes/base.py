"""Defines a lane: a connection to one instance that carries many jobs, in any protocol.

A kind of lane implements ``Lane``'s abstract methods and keeps two promises: every job that was
submitted ends with exactly one of ``JobSink.on_ended`` and ``on_lost``, and its owner gets
``lane_opened`` and ``lane_closed`` in turns. It reconnects by itself until it is closed.
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
"""One frame in this many is timed from its decoding to its tokens being written (LB-8)."""


class JobSink(Protocol):
    """Hears of one job on a lane. Called by the lane's reader: must neither wait nor raise."""

    def on_started(self, wait_ms: float) -> None:
        """The worker began with the job, which had waited there for ``wait_ms``."""

    def on_cached(self, tokens: int) -> None:
        """The prefix cache had that many tokens of the prompt, whose answer begins now."""

    def on_prompt(self, logprobs: PromptLogprobs) -> None:
        """Log-probabilities of the prompt's next tokens came, for a job that asks for them."""

    def on_tokens(self, delta: Delta, now: float) -> None:
        """The answer's next tokens came; ``now`` is in seconds of the clock."""

    def on_paused(self) -> None:
        """The job is paused; ``on_resumed``, ``on_ended`` or ``on_lost`` follows."""

    def on_resumed(self) -> None:
        """The job runs again."""

    def on_ended(self, end: End) -> None:
        """The job's terminal record; nothing follows."""

    def on_lost(self, error: TidegateError) -> None:
        """The job is lost; nothing follows."""


class LaneOwner(Protocol):
    """Hears of a lane's own state."""

    def lane_opened(self, lane: "Lane", first: Frame) -> None:
        """The lane is up. ``first`` carries the model card."""

    def lane_reported(self, lane: "Lane", frame: Frame) -> None:
        """A frame came with statistics, a drain, a new card or a report of the prefix cache."""

    def lane_closed(self, lane: "Lane", reason: str) -> None:
        """The lane is broken; its jobs are lost."""

    def emission_sampled(self, seconds: float, tokens: int) -> None:
        """A frame with ``tokens`` tokens took ``seconds`` to reach its clients' sockets."""


class JobFields(TypedDict):
    """The fields that a job is submitted with: those of ``Submit`` except its lane and handle."""

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
    """One lane to the instance at ``address``. Its jobs are numbered by ``handle``."""

    _sessions: Reconnector
    """Connections, one after another; each kind of lane makes it."""

    def __init__(self, address: str, owner: LaneOwner, clock: Clock) -> None:
        self.address = address
        self.is_open = False
        self.is_reopening = False
        """Whether it was closed as stale, and no attempt to connect has failed since."""
        self.is_closing = False
        """Whether Triton takes no new requests for the model; its jobs continue."""
        self.last_frame_at = clock.now()
        """When the peer last sent something, in seconds of the clock."""
        self.is_exhausted = False
        """Whether the lane has carried enough that a new lane is to take its place."""
        self.successor: Lane | None = None
        """The lane that takes new jobs once it is open; jobs that are on this one end here."""
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
        """Number of jobs that take a place at the instance."""

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
        """Make a job stand still, with its KV kept. Idempotent; for workers that ``can_pause``."""

    def resume(self, handle: int) -> None:  # noqa: B027 - of no use for some kinds
        """Make a paused job continue. Idempotent."""

    # ── for its owner ────────────────────────────────────────────────────────────────────────

    def start(self) -> None:
        self._sessions.start()

    @abstractmethod
    async def close(self) -> None:
        """Close the lane for good: the worker stops what still runs on it. Idempotent."""

    def break_off(self, reason: str) -> None:
        """Give this connection up and make another."""
        self._sessions.break_off(reason)

    def reopen(self) -> None:  # noqa: B027 - of no use for some kinds
        """Connect again, because another lane to this worker was found to be stale."""

    @abstractmethod
    def describe(self) -> None:
        """Ask for the card and a full report of the prefix cache."""

    def probe(self) -> None:  # noqa: B027 - of no use for some kinds
        """Check that messages still arrive, if nothing else shows it; call it often."""

    # ── for kinds of lanes ───────────────────────────────────────────────────────────────────

    def _sample_emission(self, since: float, tokens: int) -> None:
        """Tell how long ``tokens`` took since ``since``, once in ``SAMPLE_EVERY`` calls."""
        self._until_sample -= 1
        if self._until_sample <= 0 and tokens:
            self._until_sample = SAMPLE_EVERY
            self._owner.emission_sampled(self._clock.now() - since, tokens)


def lost(why: str = "") -> InstanceLost:
    """The error of a job whose instance went away."""
    said = f": {why}" if why else "; try again"
    return InstanceLost(f"the instance that worked on this was lost{said}")
