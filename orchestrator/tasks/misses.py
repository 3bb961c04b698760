"""Blames one stage for each missed deadline, by where the time went."""

from enum import StrEnum

from orchestrator.tasks.deadline import Part
from orchestrator.tasks.ending import Budget, Ending
from orchestrator.tasks.task import Task

LIKELY = 0.9
"""Chance of being in time, when it was sent, above which a task was expected to be."""


class MissStage(StrEnum):
    """The stages that can be to blame."""

    QUEUE = "queue"
    """The task waited, here or in the worker, or was never sent."""
    ROUTE = "route"
    """The way to the worker and back."""
    PREFILL = "prefill"
    DECODE = "decode"
    RETRY = "retry"
    """An instance did not finish the task, and it began again elsewhere."""
    PREDICTION = "prediction"
    """The task was sent in good time by what was known, and the worker took longer."""


TIMED = (MissStage.QUEUE, MissStage.ROUTE, MissStage.PREFILL, MissStage.DECODE)
"""Stages that a budget has figures for."""


def times_of(budget: Budget) -> dict[MissStage, float]:
    """Milliseconds by stage."""
    spent = (budget.queue_ms, budget.route_ms, budget.prefill_ms, budget.decode_ms)
    return dict(zip(TIMED, spent, strict=True))


def blame(task: Task, ending: Ending) -> MissStage:
    """The stage to blame for a miss.

    The first that applies: an instance failed; it was never sent; the way took longest; its chance
    was good when it was sent; else the stage that took longest. A first token that came too late
    has nothing to do with decoding, a late one after it with nothing else.
    """
    if task.attempts:
        return MissStage.RETRY
    if not task.marks.dispatched:
        return MissStage.QUEUE
    if ending.missed_part is Part.TOKEN_GAP:
        return MissStage.DECODE
    times = times_of(ending.budget)
    if ending.missed_part is Part.FIRST_TOKEN:
        del times[MissStage.DECODE]
    longest = max(times, key=times.__getitem__)
    if longest is MissStage.ROUTE:
        return longest
    if task.given_chance is not None and task.given_chance >= LIKELY:
        return MissStage.PREDICTION
    return longest
