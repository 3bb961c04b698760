"""Hedging (OR-10): a job that is late with its first token gets a rival on another instance.

The first token wins; the loser is cancelled, and its end is waited for. Only while nothing waits
in the queue, where another instance has a free slot, when slack is short, and for at most one
request in fifty: a second copy of a job is work that somebody else could have used.
"""

from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.dispatch.retry import RetryBudget
from orchestrator.instances.registry import Registry
from orchestrator.placement import Spec, feasible
from orchestrator.prediction import Load, StepModel, Work
from orchestrator.prediction.forecaster import least_tokens
from orchestrator.tasks.task import Task

SHORT_SLACK = 2.0
"""Slack is short when less time is left than so many times what the task takes at a slow pace."""


@dataclass(slots=True)
class HedgeStats:
    """What became of hedged jobs. Each race is won or lost by the rival, or nobody came first."""

    begun: int = 0
    won: int = 0
    lost: int = 0
    aborts_verified: int = 0
    """Losers whose worker has said that they are gone."""


class Hedger:
    """Decides which jobs get a rival, and where."""

    def __init__(
        self, registry: Registry, tokens_of: Callable[[Task], int], *, share: float
    ) -> None:
        """``share`` of the requests offered are hedged at most; 0 hedges none.

        ``tokens_of`` is how long a task's answer will usually be.
        """
        self._tokens_of = tokens_of
        self._registry = registry
        self.budget = RetryBudget(share, 1.0, is_full=False)
        self.stats = HedgeStats()

    def is_due(
        self, task: Task, basis: tuple[StepModel, Load] | None, sent_at: float, now: float
    ) -> bool:
        """Whether a job sent at ``sent_at`` is late with its first token, and that matters."""
        if self.budget.is_empty or basis is None or not basis[0].known:
            return False
        model, load = basis
        least_ms = model.least_ms(Work(1, 0, least_tokens(task)))
        left_ms = task.deadline.left_ms(now)
        usual = Work(task.prompt_tokens, 0, self._tokens_of(task))
        if left_ms > SHORT_SLACK * model.slow_ms(usual) or left_ms <= least_ms:
            return False
        first_ms = model.estimate(Work(task.prompt_tokens), load).upper_ms
        return 1000 * (now - sent_at) > first_ms

    def target(self, task: Task) -> str | None:
        """The least loaded other instance with a slot free for ``task``, if any."""
        tokens = task.prompt_tokens + task.sampling.max_tokens
        spec = Spec(task.model, task.vocabulary, tokens, task.job.placement)
        free = [
            c
            for c in feasible(spec, self._registry.candidates())
            if c.ready
            and c.name != task.instance
            and c.name not in task.failed_on
            and c.load < self._registry.instances[c.name].concurrency.slots
        ]
        return min(free, key=lambda c: (c.load / c.slots, c.name)).name if free else None
