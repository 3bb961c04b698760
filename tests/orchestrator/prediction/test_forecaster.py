"""What tasks will take, beside what has been learnt of lengths and steps."""

import math
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from orchestrator.prediction.forecaster import Capacity, Forecaster
from orchestrator.prediction.promises import Promises
from tests.support.cases import for_each
from tests.support.clock import ManualClock
from tests.support.paces import pace_of

NOTHING = Capacity((), 0, 0, 0.0, 1.0)


@for_each("needed", [0.2, 0.5])
def test_dl16_named_deadlines_are_as_safe_as_it_takes(needed: float) -> None:
    """Where so much longer than predicted is enough, as a logarithm, nine in ten are kept, and no
    more is put on all others."""
    promises = Promises(Forecaster(lambda model: NOTHING, drops_infeasible=True), ManualClock())
    rng, kept = random.Random(5), []
    for _ in range(2000):
        kept.append(math.log(promises.stretch("m")) >= needed + rng.uniform(-0.2, 0.2))
        promises._learn("m", kept=kept[-1])
    assert 0.9 <= sum(kept) / len(kept) < 0.97
    assert abs(math.log(promises.stretch("m")) - needed) < 0.4


def test_or18_work_waits_longer_where_others_fill_most_of_the_slots() -> None:
    pace = pace_of(16, 512, 9.5, 0.5, 0.1)
    alone = Capacity((pace,) * 4, slots=64, free=0, min_start_ms=0.0, part=1.0)
    waiting: Any = [SimpleNamespace(model="m", work_ms=1000.0, is_background=False)]
    found = []
    for capacity in (alone, replace(alone, part=0.25)):
        forecaster = Forecaster(lambda model, of=capacity: of, drops_infeasible=True)  # type: ignore[misc]
        forecaster.begin_plans(waiting, 0.0)
        found.append(forecaster._wait_ms["m"])
    assert found[1] == 4 * found[0]
