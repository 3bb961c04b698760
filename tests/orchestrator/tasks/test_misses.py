"""One stage is to blame for each miss."""

import pytest

from orchestrator.tasks.deadline import Part
from orchestrator.tasks.ending import Budget, Ending
from orchestrator.tasks.windows import MissStage, blame
from protocol import FinishReason, Outcome
from tests.orchestrator.tasks.test_settle import make_task

LONG_QUEUE = Budget(queue_ms=600, route_ms=5, prefill_ms=50, decode_ms=400)
LONG_ROUTE = Budget(queue_ms=6, route_ms=500, prefill_ms=50, decode_ms=400)
LONG_PREFILL = Budget(queue_ms=60, route_ms=5, prefill_ms=300, decode_ms=40)
LONG_DECODE = Budget(queue_ms=60, route_ms=5, prefill_ms=50, decode_ms=400)


@pytest.mark.parametrize(
    ("sent", "attempts", "chance", "part", "budget", "stage"),
    [
        (False, 0, None, Part.WHOLE, LONG_QUEUE, MissStage.QUEUE),
        (True, 1, 0.95, Part.WHOLE, LONG_DECODE, MissStage.RETRY),
        (True, 0, 0.3, Part.WHOLE, LONG_QUEUE, MissStage.QUEUE),
        (True, 0, 0.3, Part.WHOLE, LONG_PREFILL, MissStage.PREFILL),
        (True, 0, 0.3, Part.WHOLE, LONG_DECODE, MissStage.DECODE),
        (True, 0, 0.95, Part.WHOLE, LONG_DECODE, MissStage.PREDICTION),
        (True, 0, 0.95, Part.WHOLE, LONG_ROUTE, MissStage.ROUTE),
        (True, 0, 0.3, Part.FIRST_TOKEN, LONG_DECODE, MissStage.QUEUE),
        (True, 0, 0.95, Part.TOKEN_GAP, LONG_QUEUE, MissStage.DECODE),
    ],
)
def test_the_stage_to_blame(
    sent: bool, attempts: int, chance: float | None, part: Part, budget: Budget, stage: MissStage
) -> None:
    task = make_task()
    task.marks.dispatched = 100.1 if sent else 0.0
    task.attempts, task.given_chance = attempts, chance
    ending = Ending(Outcome.MISSED, FinishReason.DEADLINE, budget=budget, missed_part=part)
    assert blame(task, ending) is stage
