"""Handles the end of an attempt, and the ends of tasks.

An attempt ends when its worker reports the end or its lane is lost. The instance's breaker counts
it, the forecaster learns from it, and the task is retried or ends.
"""

import math
from collections.abc import Iterable, Iterator

from orchestrator.clock import Clock
from orchestrator.dispatch.attempt import Attempt
from orchestrator.dispatch.metrics import DispatchMetrics
from orchestrator.dispatch.resume import ending_of_complete_text
from orchestrator.dispatch.retry import RETRYABLE, Fate, Retrier, RetryAfter, RetryDenied
from orchestrator.errors import TidegateError
from orchestrator.instances.breaker import record_end
from orchestrator.instances.instance import InstanceState
from orchestrator.instances.registry import Registry
from orchestrator.prediction.prediction import Prediction
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.settle import Settler
from orchestrator.tasks.task import Loss, Task
from orchestrator.tasks.verdicts import judge, lost, overdue, poisonous
from protocol import AbortCause, Code, End, FinishReason


class Completion:
    """Handles an attempt's end, after the dispatcher has detached it from its task."""

    def __init__(
        self,
        registry: Registry,
        settler: Settler,
        metrics: DispatchMetrics,
        prediction: Prediction,
        retrier: Retrier,
        clock: Clock,
    ) -> None:
        self._registry = registry
        self._settler = settler
        self._metrics = metrics
        self._prediction = prediction
        self._retrier = retrier
        self._clock = clock

    def ended(self, attempt: Attempt, end: End, *, is_current: bool) -> RetryAfter | None:
        """Handle an end that the worker reported. ``is_current``: the task still used this job.

        Returns when to retry the task; None if it is not retried.
        """
        now = self._clock.now()
        _trace(attempt, end, now)
        self._measure(attempt, end, now)
        instance = self._registry.instances.get(attempt.address)
        record_end(self._registry.breakers, instance, attempt, end, now)
        self._learn(attempt, end, now, is_current=is_current)
        if not is_current:
            return None
        task = attempt.task
        if end.code is Code.INSTANCE_LOST:
            self._note_loss(attempt, now, is_death=True)
        if end.code in RETRYABLE and self._complete_text(attempt, now) is None:
            is_planned = end.code is Code.DRAINING and instance is not None and instance.draining
            retry = self._retrier.decide(task, attempt.address, now, planned=is_planned)
            if retry is not None:
                return retry
            if self._end_poisonous(task, now):
                return None
        stats = self._prediction.feasibility.stats
        stats.stopped(task, end.code, task.deadline.left_ms(now), spared=end.spared)
        self._settler.settle(task, judge(task, end, now), end)
        return None

    def lost(
        self, attempt: Attempt, error: TidegateError, *, is_current: bool
    ) -> RetryAfter | None:
        """Handle a job that was lost with its lane. Returns the same as ``ended``."""
        now = self._clock.now()
        _trace(attempt, None, now)
        self._settler.metrics.count_late(attempt.late_tokens)
        instance = self._registry.instances.get(attempt.address)
        record_end(self._registry.breakers, instance, attempt, None, now)
        if not is_current:
            return None
        self._note_loss(attempt, now)
        task = attempt.task
        ending = self._complete_text(attempt, now)
        if ending is None:
            retry = self._retrier.decide(task, attempt.address, now)
            if retry is not None:
                return retry
            if self._end_poisonous(task, now):
                return None
        self._settler.settle(task, ending or lost(task, error))
        return None

    def leave(self, in_flight: Iterable[Attempt]) -> Iterator[tuple[Attempt, RetryAfter]]:
        """Withdraw attempts that another instance can continue: those that wait for their first
        token on a suspect instance, and those that will probably outlast their instance's drain
        (OR-14)."""
        now = self._clock.now()
        leaving = {
            each.address: each
            for each in self._registry
            if each.state is InstanceState.SUSPECT or each.drain_ends_at < math.inf
        }
        for attempt in [each for each in in_flight if each.address in leaving]:
            task, instance = attempt.task, leaving[attempt.address]
            if task.attempt is not attempt:
                continue
            is_silent = instance.state is InstanceState.SUSPECT and not task.completion_tokens
            # A task that cannot risk another worker would only wait until this worker's fate is
            # known.
            is_silent = is_silent and self._retrier.can_lose_another(task, now)
            left_ms = 1000 * (instance.drain_ends_at - now)
            if not is_silent and (
                left_ms == math.inf or self._prediction.schedule.left_ms(task) <= left_ms
            ):
                continue
            retry = self._retrier.decide(
                task, attempt.address, now, elsewhere=True, planned=not is_silent
            )
            if retry is not None:
                if is_silent:
                    self._note_loss(attempt, now)
                attempt.withdraw()
                yield attempt, retry

    def awaits_fate(self, task: Task) -> bool:
        """Whether a task must wait for its retry until it is known whether its workers died. If
        enough of them died, ends the task and returns False."""
        now = self._clock.now()
        return not self._end_poisonous(task, now) and (
            self._retrier.fate_of(task, now) is Fate.OPEN
        )

    def _end_poisonous(self, task: Task, now: float) -> bool:
        if self._retrier.fate_of(task, now) is not Fate.POISON:
            return False
        self._retrier.denied[RetryDenied.POISON] += 1
        self._settler.settle(task, poisonous(task))
        return True

    def _note_loss(self, attempt: Attempt, now: float, *, is_death: bool = False) -> None:
        """Record that a worker disappeared or hangs, perhaps because of this attempt's task."""
        instance = self._registry.instances.get(attempt.address)
        # A model reload ends a healthy worker.
        if instance is not None and not instance.is_reopening:
            loss = Loss(attempt.address, instance.process_id, now, is_death)
            attempt.task.losses.append(loss)

    def settle(self, task: Task, ending: Ending) -> None:
        """End a task that no worker has, or that does not wait for its worker."""
        self._settler.settle(task, ending)

    def _measure(self, attempt: Attempt, end: End, now: float) -> None:
        metrics = self._metrics
        self._settler.metrics.count_late(attempt.late_tokens + end.late_tokens)
        if attempt.cause is not None:
            freed_ms = 1000 * (now - attempt.abandoned_at)
            if attempt.cause is AbortCause.DISCONNECT:
                metrics.disconnect_ms.observe(freed_ms)
            metrics.cancellation_ms.observe(freed_ms)
        cause = _abort_cause(attempt, end)
        if cause and end.abort_ms is not None:
            metrics.abort_freed_ms.labels(cause).observe(end.abort_ms)

    def _learn(self, attempt: Attempt, end: End, now: float, *, is_current: bool) -> None:
        task, instance = attempt.task, self._registry.instances.get(attempt.address)
        is_abandoned = attempt.abandoned_at > 0
        if (is_current or is_abandoned) and not attempt.begun_tokens:
            self._prediction.forecaster.ended(task, end)
        if instance is not None and end.code is None and not task.pauses:
            worker_ms = end.wait_ms + end.prefill_ms + end.decode_ms
            way_ms = 1000 * (now - attempt.dispatched_at) - worker_ms
            instance.round_trip_ms.append(max(0.0, way_ms))

    def _complete_text(self, attempt: Attempt, now: float) -> Ending | None:
        """The ending of a text that is complete without its worker's ``End``; None otherwise."""
        task, instance = attempt.task, self._registry.instances.get(attempt.address)
        ending = ending_of_complete_text(task, instance)
        if ending is None or task.deadline.left_ms(now) >= 0:
            return ending
        return overdue(task, now)


def _trace(attempt: Attempt, end: End | None, now: float) -> None:
    task = attempt.task
    if task.spans is not None:
        first = task.marks.first_token
        task.spans.attempt_ended(attempt.address, attempt.dispatched_at, first, end, now)


def _abort_cause(attempt: Attempt, end: End) -> str:
    """Why a job was stopped early, by either side; empty for any other end (WP-5)."""
    if attempt.cause is not None:
        return attempt.cause.value
    if end.reason is FinishReason.DEADLINE:
        return "deadline"
    ending = attempt.task.ending  # already set if the task's own timer stopped the job
    if ending is None or not attempt.abandoned_at:  # e.g. a job that was taken back
        return ""
    return "deadline" if ending.finish_reason is FinishReason.DEADLINE else ""
