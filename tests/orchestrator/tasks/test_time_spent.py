"""Where a task's time went (DL-9, DL-18)."""

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.tasks.time_spent import TimeSpent
from protocol import End, FinishReason
from tests.support.cases import for_each


def end_with(wait_ms: float, prefill_ms: float, decode_ms: float = 0.0) -> End:
    return End(0, FinishReason.STOP, 3, 2, wait_ms, prefill_ms, decode_ms, left_ms=0.0)


def spent_at(received: float, *, sent: float, started: float, token: float) -> TimeSpent:
    """Started after 40 ms in the worker's queue."""
    spent = TimeSpent(received)
    spent.sent(sent)
    spent.started(started, 40.0)
    spent.token(token)
    return spent


def test_dl9_the_worker_divides_the_time_to_the_first_token() -> None:
    spent = spent_at(100.0, sent=100.1, started=100.2, token=100.5)
    assert str(spent.budget(100.8, 200.0)) == (
        "queue=140.0;route=60.0;prefill=300.0;decode=300.0;left=200.0"
    )
    assert str(spent.budget(100.8, 200.0, end_with(50.0, 290.0, 250.0))) == (
        "queue=150.0;route=60.0;prefill=290.0;decode=300.0;left=200.0"
    )


def test_dl18_a_lost_attempt_keeps_its_parts_and_the_next_one_begins_again() -> None:
    spent = spent_at(100.0, sent=100.1, started=100.2, token=100.5)
    spent.waits(100.6)
    spent.sent(101.0)
    spent.started(101.1, 10.0)
    spent.token(101.3)
    # The worker's account is of the second attempt only.
    budget = spent.budget(101.4, 0.0, end_with(wait_ms=10.0, prefill_ms=200.0))
    assert str(budget) == "queue=550.0;route=150.0;prefill=500.0;decode=200.0;left=0.0"


def test_dl18_a_pause_is_a_wait_and_goes_on_where_it_was() -> None:
    spent = spent_at(100.0, sent=100.0, started=100.1, token=100.2)
    spent.waits(100.3)
    spent.token(100.31)  # it was on its way when the pause was asked for
    spent.resumed(101.3)
    budget = spent.budget(101.4, 0.0, end_with(wait_ms=0.0, prefill_ms=100.0))
    assert str(budget) == "queue=1000.0;route=100.0;prefill=100.0;decode=200.0;left=0.0"


@for_each(
    ("now", "parts"),
    [
        (103.0, "queue=2600.0;route=50.0;prefill=150.0;decode=700.0;left=0.0"),
        # A clock that was set back makes no part negative: a task whose request cannot be read any
        # more came by the wall's clock, maybe after now.
        (97.0, "queue=0.0;route=0.0;prefill=0.0;decode=0.0;left=0.0"),
    ],
)
def test_dl18_an_earlier_process_had_its_parts(now: float, parts: str) -> None:
    spent = TimeSpent(100.0)
    spent.restore((0.1, 0.05, 0.15, 0.7), now)
    assert str(spent.budget(now + 0.5, 0.0)) == parts


MOVES = st.lists(
    st.tuples(
        st.sampled_from(("sent", "started", "token", "waits", "resumed")),
        st.floats(-0.001, 10.0),  # a frame's time may lie a moment before what was told last
        st.floats(0.0, 20_000.0),
    ),
    max_size=12,
)


@given(
    moves=MOVES,
    earlier=st.tuples(*[st.floats(0.0, 5.0)] * 4),
    reported=st.none() | st.tuples(st.floats(-1.0, 30_000.0), st.floats(-1.0, 30_000.0)),
)
def test_dl18_parts_are_disjoint_and_sum_to_the_time_since_the_request_came(
    moves: list[tuple[str, float, float]],
    earlier: tuple[float, float, float, float],
    reported: tuple[float, float] | None,
) -> None:
    """DL-18: whatever happened in whatever order, and whatever the worker says."""
    spent, now, latest = TimeSpent(100.0), 107.0, 107.0
    spent.restore(earlier, now)
    for move, step, wait_ms in moves:
        now = latest + step
        latest = max(latest, now)
        match move:
            case "sent":
                spent.sent(now)
            case "started":
                spent.started(now, wait_ms)
            case "token":
                spent.token(now)
            case "waits":
                spent.waits(now)
            case "resumed":
                spent.resumed(now)
    end = None if reported is None else end_with(*reported)
    budget = spent.budget(latest, 0.0, end)
    parts = (budget.queue_ms, budget.route_ms, budget.prefill_ms, budget.decode_ms)
    assert min(parts) >= 0
    assert abs(sum(parts) - 1000 * (latest - 100.0)) < 1e-3
