"""DL-3, DL-14: floors, and the schedule of an answer's parts."""

import math

import pytest

from orchestrator.api.http.responses import error_headers
from orchestrator.errors import DeadlineExceeded
from orchestrator.tasks.deadline import NO_PARTS, Deadline, Parts


def test_dl3_the_floor() -> None:
    deadline = Deadline(at=10.0, unix_ms=0)
    deadline.require(10, now=9.98)
    for now in (9.99, 9.995, 10.0, 12.0):
        with pytest.raises(DeadlineExceeded) as caught:
            deadline.require(10, now=now)
        headers = error_headers(caught.value)
        assert headers["x-should-retry"] == "false"
        exceeded = headers.get("X-Deadline-Exceeded-By-Ms")
        if now < 10.0:
            assert exceeded is None, "it is not past yet"
        else:
            assert exceeded is not None
            assert float(exceeded) == pytest.approx((now - 10.0) * 1000, abs=1e-3)


def test_dl14_the_gap_is_a_schedule() -> None:
    """It starts at the first-token deadline, or where none is stated when the first token came."""
    promised = Parts(first_token_at=52.0, token_gap_s=0.5)
    assert [promised.due_at(n, 51.0) for n in (1, 2, 4)] == [52.0, 52.5, 53.5]
    free = Parts(token_gap_s=0.5)
    assert [free.due_at(n, 51.0) for n in (1, 2, 4)] == [math.inf, 51.5, 52.5]
    assert NO_PARTS.due_at(2, 51.0) == math.inf


def test_dl3_the_floor_holds_for_a_first_token_too() -> None:
    Parts(first_token_at=10.0).require(10, now=12.0)  # a wish refuses nothing
    cut = Parts(first_token_at=10.0, cut_at=10.0)
    cut.require(10, now=9.98)
    for now in (9.995, 12.0):
        with pytest.raises(DeadlineExceeded) as caught:
            cut.require(10, now=now)
        assert caught.value.details["part"] == "first_token"
        assert caught.value.exceeded_by_ms == (None if now < 10.0 else 2000.0)
