"""One deadline for a whole run, on the simulator: whoever says what is to come keeps more runs."""

import pytest

from perf.sim.runs import LONG, RIVALS, SHORT, AgentRun, KeptRuns, measure, measure_rival
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


def test_the_contexts_of_long_runs_grow_by_what_is_said() -> None:
    load = LONG.draw(LONG.rates(1.2), 60.0, SEED)
    runs = [one for one in load if isinstance(one, AgentRun)]
    run = max(runs, key=lambda one: len(one.calls))
    before: tuple[int, ...] = ()
    for call in run.asked():
        assert call.prompt[: len(before)] == before
        assert len(call.prompt) == call.prompt_tokens > len(before)
        before = call.prompt + (1,) * call.length
    assert 25 <= len(run.calls) <= 40
    assert 60_000 < len(before) < LONG.fleet.context_tokens


@for_each("name", RIVALS)
def test_a_rivals_clients_make_all_calls_of_their_runs(name: str) -> None:
    load = SHORT.draw(SHORT.rates(0.2), 6.0, SEED)
    runs = [one for one in load if isinstance(one, AgentRun)]
    kept = measure_rival(load, name, SHORT, seed=SEED, warm_s=0.0)
    assert kept.runs_kept == kept.runs == len(runs) > 0
    assert kept.others_kept == kept.others == len(load) - len(runs)
