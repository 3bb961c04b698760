"""DL-10: attainment and goodput over the last minutes, and the one stage to blame for a miss."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.tasks.deadline import Part
from orchestrator.tasks.ending import Budget, Ending
from orchestrator.tasks.job import Priority
from orchestrator.tasks.windows import CLASS, SLICES, MissStage, SlidingWindow, Windows, blame
from orchestrator.telemetry.metrics import TENANT
from protocol import FinishReason, Outcome
from tests.orchestrator.tasks.test_settle import make_task
from tests.support.cases import for_each
from tests.support.clock import ManualClock

KEY = (CLASS, "interactive")


@given(st.lists(st.tuples(st.floats(0, 40), st.booleans()), max_size=40), st.floats(0, 100))
def test_a_window_counts_what_is_within_it(
    ended: list[tuple[float, bool]], silence_s: float
) -> None:
    """All that is younger than the window less a slice, and nothing that is older than it."""
    length_s, now = 60.0, 1000.0
    window = SlidingWindow(length_s, now)
    at = []
    for gap_s, met in ended:
        now += gap_s
        at.append((now, met))
        window.count(KEY, Outcome.MET if met else Outcome.MISSED, now)
    now += silence_s
    counted = window.totals(now).get(KEY)
    found = (counted.ended, counted.met) if counted else (0, 0)
    for pick in (0, 1):

        def within(age_s: float, pick: int = pick) -> int:
            return sum(met or not pick for then, met in at if now - then < age_s)

        assert within(length_s * (1 - 1 / SLICES) - 1e-6) <= found[pick] <= within(length_s + 1e-6)
    assert 0 <= window.covered_s(now) <= length_s


def test_attainment_and_goodput_by_class_and_tenant() -> None:
    clock = ManualClock()
    windows = Windows(clock)
    for outcome in (Outcome.MET, Outcome.MET, Outcome.MISSED, Outcome.ABORTED):
        windows.count(Priority.INTERACTIVE, "a", outcome)
    windows.count(Priority.BATCH, "b", Outcome.MET)
    clock.advance(30)
    windows.count(Priority.INTERACTIVE, "b", Outcome.MISSED)
    by_class = {(w, v): (t.met, t.ended, s) for w, v, t, s in windows.by(CLASS)}
    assert by_class["1m", "interactive"] == (2, 5, pytest.approx(30))
    assert by_class["1m", "batch"] == (1, 1, pytest.approx(30))
    by_tenant = {(w, v): (t.met, t.ended) for w, v, t, _ in windows.by(TENANT)}
    assert by_tenant["15m", "b"] == (1, 2)
    clock.advance(58)
    by_class = {(w, v): (t.met, t.ended, s) for w, v, t, s in windows.by(CLASS)}
    assert by_class["1m", "interactive"][:2] == (0, 1)
    assert by_class["5m", "interactive"][:2] == (2, 5)
    assert ("1m", "batch") not in by_class
    clock.advance(5000)
    assert not list(windows.by(CLASS))


LONG_QUEUE = Budget(queue_ms=600, route_ms=5, prefill_ms=50, decode_ms=400)
LONG_ROUTE = Budget(queue_ms=6, route_ms=500, prefill_ms=50, decode_ms=400)
LONG_PREFILL = Budget(queue_ms=60, route_ms=5, prefill_ms=300, decode_ms=40)
LONG_DECODE = Budget(queue_ms=60, route_ms=5, prefill_ms=50, decode_ms=400)


@for_each(
    ("sent", "attempts", "chance", "part", "budget", "stage"),
    [
        (False, 0, None, Part.WHOLE, LONG_QUEUE, MissStage.QUEUE),
        (True, 1, 0.95, Part.WHOLE, LONG_DECODE, MissStage.RETRY),
        (True, 0, 0.3, Part.WHOLE, LONG_QUEUE, MissStage.QUEUE),
        (True, 0, 0.3, Part.WHOLE, LONG_PREFILL, MissStage.PREFILL),
        (True, 0, 0.3, Part.WHOLE, LONG_DECODE, MissStage.DECODE),
        (True, 0, 0.95, Part.WHOLE, LONG_DECODE, MissStage.PREDICTION),
        (True, 0, 0.95, Part.WHOLE, LONG_ROUTE, MissStage.ROUTE),
        (True, 0, 0.3, Part.FIRST_TOKEN, LONG_DECODE, MissStage.QUEUE),
        (True, 0, 0.95, Part.TOKEN_GAP, LONG_QUEUE, MissStage.DECODE),
    ],
)
def test_the_stage_to_blame(
    sent: bool, attempts: int, chance: float | None, part: Part, budget: Budget, stage: MissStage
) -> None:
    task = make_task()
    task.marks.dispatched = 100.1 if sent else 0.0
    task.attempts, task.given_chance = attempts, chance
    ending = Ending(Outcome.MISSED, FinishReason.DEADLINE, budget=budget, missed_part=part)
    assert blame(task, ending) is stage
