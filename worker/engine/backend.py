"""What computes for the engine's loop: our own scheduler and runner, or a third party's engine.

The loop (``EngineLoop``) owns deadlines, aborts, ends and accounts. A backend owns the queue, the
batch and the memory, and computes steps.
"""

# ruff: noqa: B027 - what most backends need not do, they leave out

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from protocol import KvReport
from worker.scheduler.end_reason import EndReason
from worker.scheduler.plan import Plan, Row, Schedule, StepResult
from worker.scheduler.request import Request
from worker.scheduler.step_time import StepTime


def _no_row(row: Row) -> None:
    """There is nothing to drop."""


@dataclass(slots=True)
class Executed:
    """The outcome of a step or, with overlap, of the step before it.

    ``plan`` is the computed part of the plan, in ``duration_s``. ``book`` records a row's new
    tokens; ``drop`` forgets a row whose request gets none of them.
    """

    plan: Plan | None = None
    result: StepResult = field(default_factory=lambda: StepResult([]))
    duration_s: float = 0.0
    was_launched: bool = False
    """Whether its rows were told to the scheduler when it was launched, one step ahead."""
    book: Callable[[Row, list[int]], None] | None = None
    drop: Callable[[Row], None] = _no_row
    failed: dict[Request, EndReason | None] = field(default_factory=dict)
    """Requests that were not computed, with the reason to end; None: they are planned again."""
    ended: dict[Request, EndReason] = field(default_factory=dict)
    """Requests that the backend ended by its own rules, after the tokens in ``result``."""
    freed: list[Request] = field(default_factory=list)
    """Requests with a ``release`` that has just finished."""


class Backend(ABC):
    """Queue, batch, memory and steps of an engine; on its thread unless stated otherwise."""

    step_time: StepTime
    min_start_budget_s: float
    steps_in_flight: int
    """Steps launched but not yet read at the time of a deadline check."""
    running: Sequence[Request]
    waiting: Sequence[Request]
    paused: Sequence[Request]

    # ── any thread ───────────────────────────────────────────────────────────────────────────

    def prepare(self, request: Request) -> None:
        """Do what a request needs once and that need not wait for the engine's thread."""

    def attach(self, wake: Callable[[], None]) -> None:
        """Set the callback, on any thread, for news from outside."""

    def interrupt(self) -> None:
        """Have a ``compute`` that waits return soon, since there is news."""

    def kv_reports(self) -> list[KvReport]:
        """See ``EngineService``."""
        return []

    @property
    def has_failed(self) -> bool:
        """Whether nothing more can be computed although no step has said so."""
        return False

    @property
    @abstractmethod
    def largest_step_tokens(self) -> int:
        """Most tokens that the current step may have."""

    # ── the queue and the batch ──────────────────────────────────────────────────────────────

    @property
    @abstractmethod
    def has_work(self) -> bool:
        """Whether any request is held."""

    @abstractmethod
    def enqueue(self, request: Request, now: float) -> EndReason | None:
        """Put a request in the queue, or say why not."""

    def unblock(self) -> None:
        """Note that a request that could not be admitted perhaps can be now."""

    @property
    @abstractmethod
    def can_pause(self) -> bool:
        """Whether requests can be paused; else that is ignored."""

    @abstractmethod
    def pause(self, request: Request) -> bool:
        """Take a running request out of the batch. False where that is not possible now: ask again
        after the next step."""

    def unpause(self, request: Request) -> None:
        """Forget that a pause was asked for, which was not possible yet."""

    @abstractmethod
    def resume(self, request: Request) -> bool:
        """Put a paused request back into the batch; False if no slot is free."""

    @abstractmethod
    def release(self, request: Request, now: float) -> bool:
        """Drop a request, in any state. True if its slot and memory are free now; else they are
        when a row of it comes next, or when ``Executed.freed`` has it."""

    def spoil(self, request: Request) -> None:
        """Discard a request's results: its numbers are not finite."""

    # ── steps ────────────────────────────────────────────────────────────────────────────────

    def begin(self, now: float) -> None:
        """Work before each step."""

    @abstractmethod
    def next_prompt_tokens(self, now: float, *, is_more_coming: bool) -> int:
        """Most prompt tokens that the next step can carry with its decodes."""

    @abstractmethod
    def schedule(self, now: float) -> Schedule:
        """Admit requests, and plan the next step."""

    @abstractmethod
    def compute(self, plan: Plan | None, patience_s: Callable[[], float]) -> Executed | None:
        """Compute a step, or launch it and return the one before; None if there is nothing to do.

        May wait for work, for ``patience_s()`` seconds. Raises ``DeviceLost`` if nothing can be
        computed any more.
        """

    def end(self) -> None:
        """Work after each step."""

    @abstractmethod
    def counts(self) -> dict[str, Any]:
        """Fields of ``WorkerStats`` about the queue, the batch and the memory."""

    # ── idle, and the end ────────────────────────────────────────────────────────────────────

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the books do not add up. Called while nothing is held."""

    @property
    def next_expiry(self) -> float:
        """When ``begin`` has something to do although nothing is held."""
        return math.inf

    def halt(self) -> None:
        """Compute no more, so that every ``release`` is over at once."""

    @abstractmethod
    def close(self) -> None:
        """Release everything. Idempotent."""
