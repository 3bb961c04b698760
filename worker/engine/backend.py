"""The interface to what computes steps: our own scheduler and runner, or a third-party engine.

The loop (``EngineLoop``) owns deadlines, aborts, job ends and counters. A backend owns the queue,
the batch and the memory, and computes the steps.
"""

# ruff: noqa: B027 - backends override only the hooks that they need

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from protocol import KvReport
from worker.scheduler.end_reason import EndReason
from worker.scheduler.plan import Plan, Row, Schedule, StepResult
from worker.scheduler.request import Request
from worker.scheduler.roster import Roster


def _no_row(row: Row) -> None:
    """Do nothing: there is nothing to drop."""


@dataclass(slots=True)
class Executed:
    """The outcome of a step or, with overlap, of the step before it.

    ``plan`` is the computed part of the plan; it took ``duration_s``. ``book`` records a row's new
    tokens; ``drop`` discards a row whose request gets none of them.
    """

    plan: Plan | None = None
    result: StepResult = field(default_factory=lambda: StepResult([]))
    duration_s: float = 0.0
    book: Callable[[Row, list[int]], None] | None = None
    drop: Callable[[Row], None] = _no_row
    failed: dict[Request, EndReason | None] = field(default_factory=dict)
    """Requests that were not computed, with the reason to end; None means to plan them again."""
    ended: dict[Request, EndReason] = field(default_factory=dict)
    """Requests that the backend ended by its own rules; the tokens in ``result`` come first."""
    freed: list[Request] = field(default_factory=list)
    """Requests whose ``release`` has just finished."""


class Backend(ABC):
    """An engine's queue, batch, memory and steps. Called on its thread unless stated otherwise."""

    roster: Roster
    """The queue and the batch."""
    can_pause: bool
    """Whether requests can be paused; if not, pauses are ignored."""
    steps_in_flight: int
    """Steps launched but not yet read at the time of a deadline check."""

    # ── any thread ───────────────────────────────────────────────────────────────────────────

    def prepare(self, request: Request) -> None:
        """Do a request's one-time work that does not need the engine's thread."""

    def attach(self, wake: Callable[[], None]) -> None:
        """Set the callback for news from outside; any thread may call it."""

    def interrupt(self) -> None:
        """Make a waiting ``compute`` return soon because of news."""

    def kv_report(self) -> KvReport | None:
        """See ``EngineService``."""
        return None

    @property
    def has_failed(self) -> bool:
        """Whether nothing more can be computed, even if no step has reported that yet."""
        return False

    @property
    @abstractmethod
    def largest_step_tokens(self) -> int:
        """Maximum number of tokens in the current step."""

    # ── the queue and the batch ──────────────────────────────────────────────────────────────

    @abstractmethod
    def pause(self, request: Request) -> bool:
        """Take a running request out of the batch. False if that is not possible now: ask again
        after the next step."""

    def unpause(self, request: Request) -> None:
        """Forget a requested pause that was not possible yet."""

    @abstractmethod
    def resume(self, request: Request) -> bool:
        """Put a paused request back into the batch; False if no slot is free."""

    @abstractmethod
    def release(self, request: Request, now: float) -> bool:
        """Drop a request, in any state. True if its slot and memory are free now; otherwise its
        next row frees them, or ``Executed.freed`` lists it."""

    def spoil(self, request: Request) -> None:
        """Discard a request's results, because its numbers are not finite."""

    # ── steps ────────────────────────────────────────────────────────────────────────────────

    def begin(self, now: float) -> None:
        """Work before each step."""

    @abstractmethod
    def next_prompt_tokens(self, now: float, *, is_more_coming: bool) -> int:
        """Maximum number of prompt tokens that the next step can carry with its decodes."""

    @abstractmethod
    def schedule(self, now: float) -> Schedule:
        """Admit requests, and plan the next step."""

    @abstractmethod
    def compute(self, plan: Plan | None, patience_s: Callable[[], float]) -> Executed | None:
        """Compute a step, or launch it and return the one before it; None if there is no work.

        May wait up to ``patience_s()`` seconds for work. Raises ``DeviceLost`` if nothing can be
        computed any more.
        """

    def end(self) -> None:
        """Work after each step."""

    @abstractmethod
    def counts(self) -> dict[str, Any]:
        """Return the ``WorkerStats`` fields about the queue, the batch and the memory."""

    # ── idle, and the end ────────────────────────────────────────────────────────────────────

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if the accounting is wrong. Called while nothing is held."""

    @property
    def next_expiry(self) -> float:
        """Time at which ``begin`` has work to do even if nothing is held."""
        return math.inf

    def halt(self) -> None:
        """Stop computing, so that every ``release`` finishes at once."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent."""
