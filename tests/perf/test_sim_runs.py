"""One deadline for a whole run, on the simulator: clients that say what comes keep more runs."""

import pytest

from perf.sim.runs import RIVALS, SHORT, AgentRun, KeptRuns, measure, measure_rival
from tests.support.cases import for_each

SEED = 4
LOAD = 1.6
"""More than the fleet can do."""


def kept_by(manner: str) -> KeptRuns:
    load = SHORT.draw(SHORT.rates(LOAD), 5.0, SEED)
    return measure(load, manner, SHORT.fleet, seed=SEED, warm_s=0.5)


@pytest.mark.slow
def test_runs_that_say_how_many_calls_are_to_come_are_kept_more_often() -> None:
    said, rest = kept_by("calls"), kept_by("split")
    assert said.runs == rest.runs >= 18
    assert said.runs_kept > 1.1 * rest.runs_kept
    # Not at the others' cost alone.
    assert said.other_share > 0.9 * rest.other_share


@for_each("name", RIVALS)
def test_a_rivals_clients_make_all_calls_of_their_runs(name: str) -> None:
    load = SHORT.draw(SHORT.rates(0.2), 6.0, SEED)
    runs = [one for one in load if isinstance(one, AgentRun)]
    kept = measure_rival(load, name, SHORT, seed=SEED, warm_s=0.0)
    assert kept.runs_kept == kept.runs == len(runs) > 0
    assert kept.others_kept == kept.others == len(load) - len(runs)
