"""How far a request had come, by what is recorded of the whole."""

import math

from msgspec import structs

from orchestrator.recording.facts import PauseTaken, RecordedRequest
from orchestrator.tasks.job import PlacementMode, Priority
from perf.sim.replay.under_way import UnderWay, under_way
from protocol import FinishReason, OnDeadline, Outcome

WHOLE = RecordedRequest(
    id="1",
    leader_id="1",
    name_hash=0,
    key="",
    tenant="",
    model="m",
    priority=Priority.INTERACTIVE,
    arrived=0.0,
    deadline_at=20.0,
    first_token_at=math.inf,
    token_gap_s=math.inf,
    cut_at=math.inf,
    on_deadline=OnDeadline.ERROR,
    prompt_tokens=120,
    cached_tokens=20,
    max_tokens=200,
    min_tokens=0,
    is_length_stated=False,
    placement=PlacementMode.AUTO,
    placed_on=(),
    left=(),
    is_promised=False,
    reserved_chance=None,
    calls_left=0.0,
    between_calls_ms=0.0,
    chance=None,
    is_sample=False,
    outcome=Outcome.MET,
    code="",
    reason=FinishReason.STOP,
    missed_part=None,
    blamed=None,
    tokens=100,
    dispatched=2.0,
    first_token=4.0,
    ended=14.0,
    attempts=0,
    instance="a",
    spent_ms=(0.0, 0.0, 0.0, 0.0),
    pauses=(),
)


def found(request: RecordedRequest, at: float, known_until: float = 30.0) -> UnderWay:
    one = under_way(request, at, known_until)
    assert one is not None
    return one


def test_what_had_not_come_or_was_over_was_not_under_way() -> None:
    assert under_way(WHOLE, -1.0, 30.0) is None
    assert under_way(WHOLE, 14.0, 30.0) is None


def test_it_waits_then_its_prompt_is_computed_then_tokens_come() -> None:
    assert found(WHOLE, 1.0)[1:] == ("", 100, 0)
    assert found(WHOLE, 3.0)[1:] == ("a", 50, 0)
    assert found(WHOLE, 9.0)[1:] == ("a", 0, 50)


def test_nothing_comes_in_a_pause_and_nobody_works_on_it() -> None:
    paused = structs.replace(WHOLE, ended=19.0, pauses=(PauseTaken(9.0, "a", 14.0),))
    assert found(paused, 9.0)[1:] == ("", 0, 50)
    assert found(paused, 12.0)[1:] == ("", 0, 50)
    assert found(paused, 16.5)[1:] == ("a", 0, 75)


def test_one_that_goes_on_has_what_has_come_of_it_until_now() -> None:
    going_on = structs.replace(WHOLE, ended=math.inf, outcome=None, reason=None)
    assert found(going_on, 9.0, known_until=14.0).made == 50
    assert found(going_on, 14.0, known_until=14.0).made == 100


def test_one_that_never_was_sent_has_its_whole_prompt_left() -> None:
    refused = structs.replace(WHOLE, dispatched=0.0, first_token=0.0, tokens=0, instance="")
    assert found(refused, 13.0)[1:] == ("", 100, 0)
