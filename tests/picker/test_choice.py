"""Which pod gets a request: pure, by chance and finish; what is refused."""

import pytest

from orchestrator.errors import DeadlineInfeasible
from orchestrator.instances.candidate import UNLIMITED, Candidate
from orchestrator.prediction.step_model import Load
from orchestrator.prediction.urgency import Due
from picker.choice import Needs, Outlook, rank, require_feasible
from tests.support.paces import pace_of


def prospect(
    name: str,
    step_ms: float | None = 10.0,
    *,
    running: int = 0,
    waiting: int = 0,
    is_known: bool = True,
    is_reachable: bool = True,
) -> Outlook:
    """A pod of ten slots whose steps take ``step_ms``; None: nothing is known of it."""
    load = Load(running, waiting, 0, 100 * (running + waiting))
    pace = None
    if step_ms is not None:
        pace = pace_of(10, 2048, step_ms, 0.0, 0.0, fastest_ms=step_ms)
    candidate = Candidate(
        name,
        "",
        b"",
        ready=True,
        limit=UNLIMITED,
        load=running + waiting,
        step=None if pace is None else pace.under(load),
    )
    return Outlook(candidate, pace, load, step_ms or 0.0, is_known, is_reachable)


def needs(left_ms: float = 5000.0, tokens: float = 100.0, least: int = 1, home: str = "") -> Needs:
    return Needs(10, [tokens] * 16, least, Due(left_ms), home)


def names(asked: Needs, *prospects: Outlook) -> list[str]:
    return [one.name for one in rank(asked, prospects)]


def test_the_pod_that_finishes_first() -> None:
    assert names(needs(), prospect("slow", 20.0), prospect("fast", 5.0)) == ["fast", "slow"]


def test_the_chance_of_being_in_time_goes_before_the_usual_finish() -> None:
    """A short answer, the usual one, ends sooner on the slow pod; a long one is late there."""
    asked = Needs(10, [10.0] * 9 + [400.0] * 7, 1, Due(5200.0))
    fast, slow = prospect("fast", 8.0, running=10, waiting=2), prospect("slow", 25.0)
    assert slow.finish_ms(asked) < fast.finish_ms(asked)
    assert slow.chance(asked) < 0.6 and fast.chance(asked) == 1.0
    assert names(asked, slow, fast) == ["fast", "slow"]


def test_equals_go_by_load_and_where_the_conversation_was() -> None:
    pods = prospect("a", running=3), prospect("b", running=1), prospect("c", running=2)
    assert names(needs(), *pods)[0] == "b"
    assert names(needs(home="c"), *pods)[0] == "c"


def test_pods_without_metrics_stand_behind_and_those_out_of_reach_last() -> None:
    pods = [
        prospect("lost", 1.0, is_known=False, is_reachable=False),
        prospect("silent", 1.0, is_known=False),
        prospect("told", 50.0, running=9),
    ]
    assert names(needs(), *pods) == ["told", "silent", "lost"]


def test_only_what_is_certain_to_miss_on_every_pod_is_refused() -> None:
    """0.8 of the fastest step that was ever seen, for the tokens that the client insists on."""
    asked = needs(left_ms=790.0, least=100)
    require_feasible(asked, [prospect("a", 20.0), prospect("b", 9.0)], 0.0)
    require_feasible(asked, [prospect("a", 20.0), prospect("new", None)], 0.0)
    require_feasible(needs(left_ms=790.0), [prospect("a", 20.0)], 0.0)  # lengths are no certainty
    with pytest.raises(DeadlineInfeasible) as refused:
        require_feasible(asked, [prospect("a", 20.0), prospect("b", 10.0)], 1000.0)
    details = refused.value.details
    assert details["binding_constraint"] == "decode"
    assert details["predicted_finish_ms"] == pytest.approx(1000.0, rel=0.05)
    assert details["earliest_feasible_deadline"] > 1_000_000 + 1000
