"""What tasks will take, given what was learned about lengths and steps."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from orchestrator.prediction.forecaster import Capacity, Forecaster
from tests.support.paces import pace_of


def test_or18_work_waits_longer_where_others_fill_most_of_the_slots() -> None:
    pace = pace_of(16, 512, 9.5, 0.5, 0.1)
    alone = Capacity((pace,) * 4, slots=64, free=0, min_start_ms=0.0, part=1.0)
    waiting: Any = [SimpleNamespace(model="m", work_ms=1000.0, is_background=False)]
    found = []
    for capacity in (alone, replace(alone, part=0.25)):
        forecaster = Forecaster(lambda model, of=capacity: of)  # type: ignore[misc]
        forecaster.begin_plans(waiting, 0.0)
        found.append(forecaster._wait_ms["m"])
    assert found[1] == 4 * found[0]
