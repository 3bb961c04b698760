"""One deadline for a whole run, on the simulator: whoever says what is to come keeps more runs."""

import pytest

from perf.sim.__main__ import FLEET
from perf.sim.chains import KeptRuns, draw_load, measure
from perf.sim.slow_tools import measure_manner, with_slow_tools

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


def test_runs_that_cut_slow_tools_are_kept_more_often() -> None:
    load = list(with_slow_tools(draw_load(PER_S / 2, 9.0, SEED), 0.2, SEED))
    waited, cut = (
        measure_manner(load, manner, seed=SEED, warm_s=0.5) for manner in ("wait", "calls")
    )
    assert cut.runs == waited.runs >= 18
    assert waited.runs_kept == waited.runs_whole
    assert cut.runs_kept > 1.3 * waited.runs_kept
    assert cut.runs_whole < cut.runs_kept
