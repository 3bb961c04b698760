"""Decides how many rows each instance runs at once (``prediction.batch_size``)."""

from collections import defaultdict
from collections.abc import Callable

from orchestrator.clock import Clock, Timer
from orchestrator.dispatch.attempt import AttemptsInFlight
from orchestrator.dispatch.pausing import Pausing
from orchestrator.instances.concurrency import UNBOUNDED
from orchestrator.instances.instance import Instance
from orchestrator.instances.registry import Registry
from orchestrator.prediction.batch_size import (
    BATCH_WEIGHT,
    DemandArrays,
    RecentDemand,
    RecentRequest,
    best_rows,
    paced_outlook,
    row_counts,
)
from orchestrator.prediction.prediction import Prediction
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.tasks.job import Priority
from orchestrator.tasks.task import Task
from orchestrator.telemetry.log import service_log

EVERY_S, INSTANCES_AT_ONCE = 0.05, 2
"""Seconds between two decisions while work is asked for, and how many instances that is meant for.
One instance's decision takes some two milliseconds: with more instances the pause is longer, so
that it is never much of a core."""
MAX_PAUSES = 4
"""Most of these pauses between two decisions. Jobs that run on while nothing is asked for change
little, so the pause doubles with each decision that changes nothing."""
MIN_REQUESTS = 4
"""Number of recent requests below which they say nothing of the demand."""


class RowControl:
    """Bounds the rows of instances by the work that was asked for of late."""

    def __init__(
        self,
        pausing: Pausing,
        registry: Registry,
        prediction: Prediction,
        queue: TaskQueue[Task],
        in_flight: AttemptsInFlight,
        clock: Clock,
        *,
        enabled: bool,
    ) -> None:
        """``pausing`` makes room within that number. If not ``enabled``, all slots are used."""
        self.pausing = pausing
        self._registry = registry
        self._prediction = prediction
        self._queue = queue
        self._in_flight = in_flight
        self._clock = clock
        self._enabled = enabled
        self._demand: defaultdict[str, RecentDemand] = defaultdict(RecentDemand)
        self._timer: Timer | None = None
        self._pauses = 1

    def asked(self, task: Task, changed: Callable[[], None]) -> None:
        """Count a queued ``task``; ``changed`` is called when a decision changes rows."""
        if not self._enabled:
            return
        now = self._clock.now()
        self._demand[task.model].add(
            RecentRequest(
                at=now,
                left=self._prediction.forecaster.answer_tokens(task),
                prompt_tokens=task.new_prompt_tokens,
                whole_ms=task.deadline.left_ms(now),
                first_ms=1000 * (task.parts.due_at(1, 0.0) - now),
                weight=1.0 if task.priority is Priority.INTERACTIVE else BATCH_WEIGHT,
                tenant=task.tenant,
            )
        )
        if self._pauses > 1 and self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._pauses = 1
        self._later(changed)

    def _later(self, changed: Callable[[], None]) -> None:
        if self._timer is None:
            every_s = EVERY_S * max(1.0, len(self._registry.instances) / INSTANCES_AT_ONCE)
            at = self._clock.now() + self._pauses * every_s
            self._timer = self._clock.call_at(at, lambda: self._decide(changed))

    def _decide(self, changed: Callable[[], None]) -> None:
        self._timer = None
        self._pauses = min(2 * self._pauses, MAX_PAUSES)
        try:
            if self._set_rows(self._clock.now()):
                self._pauses = 1
                changed()
        except Exception:
            service_log.exception("the number of rows was not decided; will retry")
        if len(self._in_flight):
            self._later(changed)

    def _set_rows(self, now: float) -> bool:
        serving: defaultdict[str, list[Instance]] = defaultdict(list)
        for instance in self._registry:
            learner = instance.step_learner
            is_measured = learner is not None and learner.is_measured
            if instance.ready and instance.is_ours and instance.card and is_measured:
                serving[instance.card.model].append(instance)
        is_changed = False
        for model, instances in serving.items():
            slots = max(i.step_learner.model.slots for i in instances if i.step_learner)
            demand = None
            # While all can be met, nobody waits for a row.
            if model in self._demand and not self._prediction.schedule.meets_all(model, slots):
                demand = self._demand[model].demand(now)
            for instance in instances:
                before = instance.concurrency.best_rows
                instance.concurrency.best_rows = self._best(demand, instance, len(instances))
                is_changed |= instance.concurrency.best_rows != before
        return is_changed

    def _best(self, demand: DemandArrays | None, instance: Instance, instances: int) -> int:
        """Rows for ``instance``, one of ``instances`` that share the demand; keeps the outlook
        behind it there."""
        assert instance.step_learner is not None
        pace, others = instance.step_learner.model, instance.foreign_load
        most = max(1, pace.slots - others)
        if demand is None or len(demand.left) < MIN_REQUESTS:
            instance.outlook = None
            return UNBOUNDED
        rows, before = row_counts(most), instance.outlook
        current = min(most, instance.concurrency.best_rows - others)
        jobs = len(self._in_flight) + len(self._queue)
        found = instance.outlook = paced_outlook(
            demand,
            pace,
            rows,
            share=1 / instances,
            others=others,
            standing=max(0, jobs - len(demand.left)) / instances,
            prompt_share=0.0 if before is None else before.prompt_shares_at(rows, current),
        )
        chosen = best_rows(found, current)
        return UNBOUNDED if chosen == most else chosen + others
