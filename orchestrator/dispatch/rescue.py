"""Running answers that will probably miss their deadline where they run, and not elsewhere.

An instance may become slow after it was given work: others use its machine, its GPU is hot. What it
has then is late, while another instance has a slot free. Such an answer is taken away and goes on
elsewhere, from the tokens that it has, as what leaves a draining instance does (OR-14). It costs
the computation of its text's KV, so that it must be worth it: nearly lost here, nearly certain
there, once in a request's life, and only as many as there are free slots.
"""

from collections.abc import Iterable, Iterator

from orchestrator.dispatch.attempt import Attempt
from orchestrator.instances.instance import Instance
from orchestrator.instances.registry import Registry
from orchestrator.prediction.forecaster import Forecaster
from orchestrator.prediction.urgency import Costs, Due, urgency
from orchestrator.tasks.task import Task

SLOWER = 1.5
"""How many times as long as on the best instance with a free slot a token must take where a job
runs, for it to be looked at."""
LOST_HERE, SURE_THERE = 0.3, 0.7
"""Chance of being in time below which a job may leave, and above which it may go to another
instance."""


class Rescuer:
    """Finds jobs to move, where instances of one model have grown apart."""

    def __init__(self, registry: Registry, forecaster: Forecaster) -> None:
        self._registry = registry
        self._forecaster = forecaster

    def due(self, in_flight: Iterable[Attempt], now: float) -> Iterator[Attempt]:
        """Jobs that should go on elsewhere. Each is counted as moved once it was yielded."""
        serving = [one for one in self._registry if one.ready and one.step_learner is not None]
        if len(serving) < 2:
            return
        costs = {one.address: _costs_at(one, more=0) for one in serving}
        for model in {one.card.model for one in serving if one.card is not None}:
            free = [
                one
                for one in serving
                if one.card is not None and one.card.model == model and one.has_free_slot
            ]
            if not free:
                continue
            best = min((_costs_at(one, more=1) for one in free), key=lambda of: of.token_ms)
            room = sum(max(0, one.slots - one.load) for one in free)
            slow = {at for at, of in costs.items() if of.token_ms > SLOWER * best.token_ms}
            for attempt in self._lost_at(slow, model, in_flight):
                if room and self._is_better(attempt.task, costs[attempt.address], best, now):
                    room -= 1
                    yield attempt

    @staticmethod
    def _lost_at(slow: set[str], model: str, in_flight: Iterable[Attempt]) -> list[Attempt]:
        """Jobs on slow instances that may leave them at all."""
        if not slow:
            return []
        return [
            attempt
            for attempt in in_flight
            if attempt.address in slow
            and attempt.task.model == model
            and attempt.task.attempt is attempt
            and attempt.task.hedge is None
            and not attempt.task.paused_on
            and not attempt.task.failed_on
        ]

    def _is_better(self, task: Task, here: Costs, there: Costs, now: float) -> bool:
        left, due = self._forecaster.answer_tokens(task), Due(task.deadline.left_ms(now))
        new = 0 if task.completion_tokens else task.new_prompt_tokens
        if urgency(left, new, due, here, 1.0).chance > LOST_HERE:
            return False
        again = task.prompt_tokens + task.completion_tokens
        return urgency(left, again, due, there, 1.0).chance >= SURE_THERE


def _costs_at(instance: Instance, more: int) -> Costs:
    """What tokens take at an instance with as many jobs as it has, and so many ``more``."""
    pace = instance.pace
    rows = max(1, min(pace.slots, instance.load + more))
    token_ms = pace.step_ms(rows) * pace.mid
    return Costs(pace.prompt_token_ms * pace.mid, token_ms, token_ms / rows)
