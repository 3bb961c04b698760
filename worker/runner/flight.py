"""A step between its launch and its reading."""

from worker.runner.base import LaunchedStep
from worker.scheduler.plan import Plan, StepResult
from worker.scheduler.request import Request


class Flight:
    """What the engine remembers of a launched step. ``launched_at`` is on the engine's clock."""

    def __init__(self, plan: Plan, step: LaunchedStep, launched_at: float) -> None:
        self.plan = plan
        self.launched_at = launched_at
        self.requests: frozenset[Request] = frozenset(row.request for row in plan.rows)
        self._step = step

    def collect(self) -> StepResult:
        """Wait for the step; see ``LaunchedStep``. Raises also for a result that does not fit."""
        result = self._step.collect()
        if len(result.ids) != len(self.plan.rows):
            raise RuntimeError(f"{len(result.ids)} results for {len(self.plan.rows)} rows")
        return result
