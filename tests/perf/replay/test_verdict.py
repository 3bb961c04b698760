"""What a replay says of a miss, for a simulation of which everything is known."""

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from orchestrator.recorder import Recorder
from perf.sim.arrivals import Scenario
from perf.sim.replay.again import Recorded, RecordedRequest
from perf.sim.replay.verdict import Alone, find
from perf.sim.scenes import FLEET, SPEED, UNBOUNDED
from perf.sim.simulate import simulate
from protocol import Outcome
from tests.perf.sim_load import SEED

pytestmark = pytest.mark.slow

PER_S, SECONDS = 16.0, 12.0
WARM_S = 7.0
STEADY = replace(FLEET, spec=replace(FLEET.spec, slots=4, noise=0.0), count=1)
"""An instance whose steps do not scatter. Where they do, two simulations of one load do not agree
on what is met either."""


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    arrivals = list(Scenario(SPEED).arrivals(PER_S, SECONDS, SEED))
    run = simulate(arrivals, STEADY, UNBOUNDED, seed=SEED)
    heard: list[Any] = [getattr(call, "__self__", None) for call in run.orchestrator.on_ended]
    (recorder,) = [one for one in heard if isinstance(one, Recorder)]
    told = asyncio.run(recorder.recording())
    settings = {"queue": {"max_waiting": -1}}
    return Recorded.read(msgspec.json.encode({**told, "settings": settings}))


def misses(recorded: Recorded, most: int) -> list[RecordedRequest]:
    """Misses from all of the time after the warm-up, at most so many."""
    found = [one for one in recorded.requests if one.is_miss and one.arrived > WARM_S]
    return found[:: max(1, -(-len(found) // most))]


def test_a_replay_comes_to_what_was_recorded(recorded: Recorded) -> None:
    found = [find(recorded.around(request)) for request in misses(recorded, 2)]
    compared, agreed = (sum(getattr(one, name) for one in found) for name in ("compared", "agreed"))
    assert compared > 20, compared
    assert agreed / compared >= 0.8, (agreed, compared)
    reproduced = next(one for one in found if one.is_reproduced)
    tried = {each.change: each for each in reproduced.tried}
    assert tried[Alone.NOBODY_ELSE].met
    later = tried[Alone.LATER_DEADLINE]
    assert not later.met or later.by_s > 0


def test_a_request_that_is_met_in_the_replay_has_no_change_tried(recorded: Recorded) -> None:
    """As where its instance stood still, of which the recording knows nothing."""
    met = next(one for one in recorded.requests if one.outcome is Outcome.MET)
    found = find(recorded.around(met))
    assert found.outcome is Outcome.MET
    assert not found.is_reproduced and not found.tried


def test_of_too_many_those_are_kept_that_came_next_to_the_asked_one(
    recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("perf.sim.replay.again.MAX_REQUESTS", 4)
    asked = misses(recorded, 1)[0]
    around = recorded.around(asked)
    assert len(around.requests) == 4 and asked in around.requests and around.is_cut
