"""How far a request had come, by what is recorded of the whole."""

from dataclasses import replace

from msgspec import structs

from orchestrator.tasks.work import Marks
from perf.sim.replay.recording import Pause, RecordedRequest
from perf.sim.replay.under_way import UnderWay, under_way
from tests.perf.replay.requests import a_request

WHOLE = a_request(
    Marks(0.0, dispatched=2.0, first_token=4.0, ended=14.0), prompt_tokens=120, cached_tokens=20
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
    marks = replace(WHOLE.marks, ended=19.0)
    paused = structs.replace(WHOLE, marks=marks, pauses=(Pause(9.0, 14.0),))
    assert found(paused, 9.0)[1:] == ("", 0, 50)
    assert found(paused, 12.0)[1:] == ("", 0, 50)
    assert found(paused, 16.5)[1:] == ("a", 0, 75)


def test_one_that_goes_on_has_what_has_come_of_it_until_now() -> None:
    going_on = structs.replace(WHOLE, outcome=None, reason=None)
    assert found(going_on, 9.0, known_until=14.0).made == 50
    assert found(going_on, 14.0, known_until=14.0).made == 100


def test_one_that_never_was_sent_has_its_whole_prompt_left() -> None:
    marks = replace(WHOLE.marks, dispatched=0.0, first_token=0.0)
    refused = structs.replace(WHOLE, marks=marks, tokens=0, instance="")
    assert found(refused, 13.0)[1:] == ("", 100, 0)
