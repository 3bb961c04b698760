"""What a replay says of a miss, beside simulations of the same load with one thing changed."""

from dataclasses import replace

import pytest
from msgspec import structs

from orchestrator.recording.findings import Alone
from perf.sim.explained import SCENARIOS, RecordedRun
from perf.sim.scenes import FLEET
from pool.replay.again import Replayer
from pool.replay.verdict import explain
from protocol import Outcome
from tests.perf.sim_load import SEED

PER_S, SECONDS = 16.0, 12.0


STEADY = replace(FLEET, spec=replace(FLEET.spec, slots=4, noise=0.0), count=1)
"""An instance whose steps do not scatter. Where they do, two simulations of one load do not agree
on what is met either."""


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def recorded() -> RecordedRun:
    return RecordedRun.of(SCENARIOS["known"], PER_S, SECONDS, SEED, STEADY)


def test_a_replay_comes_to_what_was_recorded(recorded: RecordedRun) -> None:
    compared = agreed = 0
    for request in recorded.misses(4):
        question = recorded.question(request)
        again = Replayer(question.recording, question.settings).run()
        for one in question.recording.compared:
            compared += 1
            agreed += (again[one.id].outcome is Outcome.MET) is (one.outcome is Outcome.MET)
    assert compared > 50
    # 99 % here; other loads, on an edge for longer, come to 92 to 98 %.
    assert agreed / compared >= 0.9


def test_what_is_found_holds_in_a_simulation(recorded: RecordedRun) -> None:
    request = recorded.misses(1)[0]
    found = explain(recorded.question(request))
    assert found.is_reproduced and found.is_length_known and not found.not_tried
    held = list(recorded.checked(request, found))
    assert len(held) >= 3 and all(held)


def test_time_that_is_used_up_leaves_changes_untried(recorded: RecordedRun) -> None:
    miss = recorded.misses(1)[0]
    found = explain(recorded.explainer.question(miss, budget_s=0.0))
    assert found.outcome is None and not found.is_reproduced
    assert not found.tried and Alone.ONE_MORE_INSTANCE in found.not_tried


def test_a_request_that_is_met_in_the_replay_is_not_explained_away(recorded: RecordedRun) -> None:
    """As where its instance stood still, of which the recording knows nothing."""
    met = next(one for one in recorded.explainer.recorder if one.outcome is Outcome.MET)
    found = explain(recorded.question(met))
    assert found.outcome is Outcome.MET
    assert not found.is_reproduced and not found.tried


def test_a_first_token_that_was_late_is_late_in_the_replay(recorded: RecordedRun) -> None:
    question = recorded.question(recorded.misses(1)[0])
    recording, asked = question.recording, question.recording.request
    running = next(
        one
        for one in recording.compared
        if 0 < one.first_token < asked.arrived and one.outcome is Outcome.MET
    )
    late = structs.replace(running, first_token_at=running.first_token - 0.01)
    changed = structs.replace(
        recording,
        requests=[late if one is running else one for one in recording.requests],
    )
    assert Replayer(recording, question.settings).run()[running.id].outcome is Outcome.MET
    assert Replayer(changed, question.settings).run()[running.id].outcome is Outcome.MISSED
