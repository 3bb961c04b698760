"""Replans waiting tasks, a few at a time, so that no stream is delayed."""

from collections.abc import Callable

from orchestrator.clock import Clock
from orchestrator.prediction.forecaster import MIN_WAIT_MS, Forecaster
from orchestrator.queue.task_queue import AT_ONCE, TaskQueue
from orchestrator.tasks.task import Task
from orchestrator.telemetry.log import service_log

PLAN_EVERY_S = MIN_WAIT_MS / 1000
PAUSE_S = 0.005
"""Seconds between two batches of ``AT_ONCE`` tasks."""


class Replanner:
    """Replans the whole queue in rounds while tasks wait."""

    def __init__(
        self,
        queue: TaskQueue[Task],
        forecaster: Forecaster,
        clock: Clock,
        on_planned: Callable[[], None],
    ) -> None:
        """``on_planned`` is called when all waiting tasks have new plans, even if none waits."""
        self._queue = queue
        self._forecaster = forecaster
        self._clock = clock
        self._on_planned = on_planned
        self._left: list[Task] = []
        self._is_scheduled = False

    def wake(self) -> None:
        """Start rounds of planning: a task waits, here or inside a worker. Idempotent."""
        if not self._is_scheduled:
            self._later(PLAN_EVERY_S, self._begin)

    def _later(self, delay_s: float, call: Callable[[], None]) -> None:
        self._is_scheduled = True
        self._clock.call_at(self._clock.now() + delay_s, call)

    def _begin(self) -> None:
        self._is_scheduled = False
        self._left = self._queue.tasks()
        try:
            self._forecaster.begin_plans(self._left, self._clock.now())
        except Exception:
            service_log.exception("replanning failed; will retry")
            self.wake()
            return
        if self._left:
            self._some()
        else:
            self._on_planned()

    def _some(self) -> None:
        some, self._left = self._left[:AT_ONCE], self._left[AT_ONCE:]
        # Schedule first: an error with these tasks must not end the round for the others.
        if self._left:
            self._later(PAUSE_S, self._some)
        else:
            self._later(PLAN_EVERY_S, self._begin)
        try:
            self.plan(some)
        finally:
            if not self._left:
                self._on_planned()

    def plan(self, tasks: list[Task]) -> None:
        now = self._clock.now()
        waiting = [task for task in tasks if task in self._queue]
        for task in waiting:
            self._forecaster.plan(task, now)
        self._queue.reorder(waiting)
