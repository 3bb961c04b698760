"""One dispatch of a task to one instance: connects the lane, the task and the dispatcher."""

import asyncio
from collections.abc import Iterator
from typing import Protocol

from orchestrator.clock import Clock
from orchestrator.errors import TidegateError
from orchestrator.instances.breaker import BreakerToken
from orchestrator.instances.concurrency import ConcurrencyLimit, InFlightJob
from orchestrator.lanes import Lane
from orchestrator.prediction.step_model import Load, StepModel
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.task import Task
from protocol import AbortCause, Delta, End, PromptLogprobs


class AttemptOwner(Protocol):
    """The listener to which attempts report: the dispatcher."""

    def attempt_ended(self, attempt: "Attempt", end: End) -> None:
        """The worker has ended the attempt's job."""

    def attempt_lost(self, attempt: "Attempt", error: TidegateError) -> None:
        """The lane and the attempt's job are lost."""

    def listener_failed(self, attempt: "Attempt") -> None:
        """Handling a message of the attempt raised; called while the exception is being handled."""


class Attempt:
    """One task's job on a lane. It outlives the task until the worker is done."""

    def __init__(
        self,
        owner: AttemptOwner,
        task: Task,
        lane: Lane,
        concurrency: ConcurrencyLimit,
        job: InFlightJob,
        clock: Clock,
    ) -> None:
        self._owner = owner
        self._clock = clock
        self._lane = lane
        self.address = lane.address
        self.task = task
        self.breaker_token = BreakerToken(lane.address)
        self.concurrency = concurrency
        self.job = job
        self.dispatched_at = clock.now()
        self.begun_tokens = task.completion_tokens
        """Number of the text's tokens from earlier instances; 0 if none."""
        self.handle = -1
        self.basis: tuple[StepModel, Load] | None = None
        """The instance's step model and load when the job was sent; None if unknown."""
        self.has_slot = False
        """Whether the job has a slot by its worker's last report: a job that was just paused may
        still have one, and a job that was just resumed may still wait for one."""
        self.is_paused = False
        """Whether the last request to the worker was to pause the job."""
        self.late_tokens = 0
        self.abandoned_at = 0.0
        self.cause: AbortCause | None = None

    # from the lane

    def on_started(self, wait_ms: float) -> None:
        self.has_slot = True
        if self.task.attempt is not self:
            return
        try:
            self.concurrency.started(self.job, wait_ms)
            self.task.begin(self._clock.now(), wait_ms)
        except Exception:
            self._owner.listener_failed(self)

    def on_cached(self, tokens: int) -> None:
        if self.task.attempt is self:
            self.task.likely_cached = min(tokens, self.task.prompt_tokens)

    def on_prompt(self, logprobs: PromptLogprobs) -> None:
        task = self.task
        if task.attempt is self:
            task.deliver_prompt(logprobs)

    def on_tokens(self, delta: Delta, now: float) -> None:
        task = self.task
        if task.attempt is not self:
            self.late_tokens += len(delta.ids)
            return
        try:
            task.deliver(delta, now)
        except Exception:
            self._owner.listener_failed(self)

    def on_paused(self) -> None:
        self.has_slot = False

    def on_resumed(self) -> None:
        self.has_slot = True
        self.concurrency.got_slot()

    def on_ended(self, end: End) -> None:
        try:
            self._owner.attempt_ended(self, end)
        except Exception:
            self._owner.listener_failed(self)

    def on_lost(self, error: TidegateError) -> None:
        try:
            self._owner.attempt_lost(self, error)
        except Exception:
            self._owner.listener_failed(self)

    # from the task

    def prompt_computed(self) -> None:
        self.concurrency.prompt_computed(self.job)

    def abandon(self, ending: Ending) -> None:
        self.cause = ending.cause
        self.abandoned_at = self._clock.now()
        self._lane.cancel(self.handle, ending.cause or AbortCause.CANCEL)

    # from the dispatcher

    def pause(self, *, for_another: bool = True) -> None:
        """Free the slot after the step, for another job or to leave it empty; the KV stays."""
        self.is_paused = True
        self.basis = None  # its idle time says nothing about the instance
        self._lane.pause(self.handle)
        self.concurrency.pause(self.job, for_another=for_another)

    def resume(self, load: int) -> None:
        self.is_paused = False
        if self.has_slot:  # not freed yet: the worker will not report a resume
            self.concurrency.got_slot()
        self._lane.resume(self.handle)
        self.concurrency.resume(self.job, load)

    def withdraw(self) -> None:
        """Stop the job because its task continues elsewhere; late tokens are counted."""
        if self.task.attempt is self:
            self.task.attempt = None
        self._lane.cancel(self.handle, AbortCause.CANCEL)


class AttemptsInFlight:
    """Attempts that were sent and have not ended; in order, so that simulations are repeatable."""

    def __init__(self) -> None:
        self._attempts: dict[Attempt, None] = {}
        self.removed = asyncio.Event()
        """Set whenever an attempt ends on its worker; the waiter clears it."""

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self._attempts)

    def __len__(self) -> int:
        return len(self._attempts)

    def add(self, attempt: Attempt) -> None:
        self._attempts[attempt] = None

    def remove(self, attempt: Attempt) -> None:
        self._attempts.pop(attempt, None)
        self.removed.set()
