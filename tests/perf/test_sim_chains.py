"""One deadline for a whole run, on the simulator: whoever says what is to come keeps more runs."""

import pytest

from perf.sim.__main__ import FLEET
from perf.sim.chains import KeptRuns, draw_load, measure

pytestmark = pytest.mark.slow

SEED = 4
PER_S = 46.0
"""More than the fleet can do."""


def kept_by(manner: str) -> KeptRuns:
    load = list(draw_load(PER_S, 4.5, SEED))
    return measure(load, manner, FLEET, seed=SEED, warm_s=0.5)


def test_runs_that_say_how_many_calls_are_to_come_are_kept_more_often() -> None:
    said, rest = kept_by("calls"), kept_by("rest")
    assert said.runs == rest.runs >= 18
    assert said.runs_kept > 1.1 * rest.runs_kept
    # Not at the others' cost alone.
    assert said.other_share > 0.9 * rest.other_share
