"""Hedged requests (OR-10): a job with a late first token is also sent to a second instance.

The first token wins; the other attempt is cancelled and its end is awaited. Hedges are sent only
while the queue is empty, another instance has a free slot and slack is short, and for at most one
request in fifty: a second copy of a job takes capacity from others. (Dean and Barroso, The tail at
scale, 2013.)
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from orchestrator.dispatch.attempt import Attempt
from orchestrator.dispatch.retry import Retrier, RetryBudget
from orchestrator.instances.registry import Registry
from orchestrator.placement.choose import feasible
from orchestrator.placement.requirements import requirements_of
from orchestrator.prediction.forecaster import Forecaster, least_tokens
from orchestrator.prediction.step_model import Load, StepModel, Work
from orchestrator.tasks.task import Task


class Hedger:
    """Decides which jobs to hedge and where; keeps the winning attempt."""

    def __init__(self, registry: Registry, forecaster: Forecaster, *, share: float) -> None:
        """``share`` (0 to 1): maximum share of submitted requests to hedge; 0 hedges none."""
        self._registry = registry
        self._forecaster = forecaster
        self.budget = RetryBudget(share, 1.0, is_full=False)
        self.counts = Counter[str]()
        """Hedges: ``begun``, ``won``, ``lost``; some end without a token. ``verified`` counts
        losing attempts whose end the worker has confirmed."""

    def due(self, in_flight: Iterable[Attempt], now: float) -> Iterator[tuple[Attempt, str]]:
        """Late attempts, each with the instance for its hedge. Each is counted as sent."""
        if self.budget.is_empty:
            return
        for attempt in list(in_flight):
            task = attempt.task
            if task.attempt is not attempt or task.hedge is not None or task.completion_tokens:
                continue
            if not self.is_due(task, attempt.basis, attempt.dispatched_at, now):
                continue
            target = self.target(task, now)
            if target is None:
                continue
            self.budget.spend()
            self.counts["begun"] += 1
            yield attempt, target

    def is_due(
        self, task: Task, basis: tuple[StepModel, Load] | None, sent_at: float, now: float
    ) -> bool:
        """Whether a job sent at ``sent_at`` is late with its first token and short of slack."""
        if self.budget.is_empty or basis is None or not basis[0].known:
            return False
        model, load = basis
        least_ms = model.least_ms(least_tokens(task))
        left_ms = task.deadline.left_ms(now)
        # Slack is short if a long answer might miss its deadline in a bad case.
        long = Work(task.prompt_tokens, 0, self._forecaster.most_tokens_left(task))
        if left_ms > model.slow * model.service_ms(long) or left_ms <= least_ms:
            return False
        first_ms = model.upper_ms(Work(task.prompt_tokens, 0, 1), load)
        return 1000 * (now - sent_at) > first_ms

    def target(self, task: Task, now: float) -> str | None:
        """The least loaded other instance with a free slot for ``task``; None if there is none."""
        tokens = task.prompt_tokens + task.sampling.max_tokens
        requirements = requirements_of(task, tokens)
        left_ms = task.deadline.left_ms(now)
        free = [
            c
            for c in feasible(requirements, self._registry.candidates())
            if c.has_free_slot
            and c.name != task.instance
            and c.name not in task.failed_on
            and c.stops_within(left_ms)
        ]
        return min(free, key=lambda c: (c.load / c.limit, c.name)).name if free else None

    def promote(self, task: Task) -> bool:
        """Replace a first attempt that ended without a token by the hedge. False if none."""
        hedge, task.hedge = task.hedge, None
        if hedge is None:
            return False
        assert isinstance(hedge, Attempt) and task.attempt is None
        task.attempt, task.instance = hedge, hedge.address
        return True

    def first_token(self, winner: Attempt) -> None:
        task, hedge = winner.task, winner.task.hedge
        loser = task.attempt if hedge is winner else hedge
        assert isinstance(loser, Attempt)
        self.counts["won" if hedge is winner else "lost"] += 1
        task.attempt, task.instance = winner, winner.address
        task.hedge = None
        loser.lost_hedge = True
        loser.withdraw()


@dataclass(frozen=True, slots=True)
class Tries:
    """Another attempt for a task: after a failed one, or while the first one is late."""

    retrier: Retrier
    hedger: Hedger

    def offered(self) -> None:
        """Count a submitted request: both budgets are a share of these."""
        self.retrier.budget.offered()
        self.hedger.budget.offered()
