"""What of a recording surrounds one request."""

import pytest

from orchestrator.tasks.work import Marks
from perf.sim.replay import recording
from perf.sim.replay.recording import Recorded
from tests.perf.replay.requests import a_request


def test_of_too_many_those_are_kept_that_came_next_to_the_asked_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recording, "MAX_REQUESTS", 4)
    requests = [a_request(Marks(float(at), ended=50.0), id=str(at)) for at in range(10)]
    recorded = Recorded({}, requests, [], is_full=False)
    for asked, kept in ((0, "0123"), (5, "3456"), (9, "6789")):
        around = recorded.around(requests[asked])
        assert "".join(request.id for request in around.requests) == kept
        assert around.is_cut


def test_what_may_have_been_forgotten_is_said() -> None:
    first, second = (a_request(Marks(at, ended=at + 2.0), id=f"{at}") for at in (3.0, 4.0))
    third = a_request(Marks(6.0, ended=7.0), id="6")
    for is_full in (False, True):
        recorded = Recorded({}, [first, second, third], [], is_full=is_full)
        # Others may have ended before the first one that is kept, at 5.
        assert recorded.around(second).is_cut is is_full
        assert not recorded.around(third).is_cut
