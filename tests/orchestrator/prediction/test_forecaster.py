"""DL-16: deadlines that are named to clients are as safe as it takes."""

import random

import pytest

from orchestrator.prediction.forecaster import Capacity, Forecaster

NOTHING = Capacity((), 0, 0, 0.0)


@pytest.mark.parametrize("needed", [0.2, 0.9])
def test_dl16_named_deadlines_are_as_safe_as_it_takes(needed: float) -> None:
    """Where ``needed`` of the way to a slow pace is enough, nine in ten are kept, and no more of it
    than that is put on all others."""
    forecaster = Forecaster(lambda model: NOTHING, drops_infeasible=True)
    rng, kept = random.Random(5), []
    for _ in range(2000):
        kept.append(forecaster._safety["m"] >= needed + rng.uniform(-0.2, 0.2))
        forecaster.promise_ended("m", kept=kept[-1])
    assert 0.9 <= sum(kept) / len(kept) < 0.97
    assert abs(forecaster._safety["m"] - needed) < 0.4
