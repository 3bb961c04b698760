"""What a clip gives up for its deadline, how long stages may take, how a check is judged."""

import pytest

from clips.plan.budgets import BUDGETS, ClipStage, StageTimes
from clips.plan.plan import ClipPlan, asked_for, fit
from clips.plan.recipe import read_recipe
from clips.render.clip import judge
from clips.render.memory import Resident, clips_within, residency_plan
from clips.render.stages.base import ModelScore
from tests.support.cases import for_each

FULL = ClipPlan(seconds=8.0, fps=24, size=256, has_check=True)


@for_each(
    ("most_units", "given_up"),
    [
        (12.6, ("no check",)),
        (6.5, ("no check", "12 frames a second instead of 24")),
        (1.6, ("no check", "12 frames a second instead of 24", "128 pixels instead of 256")),
        (
            0.3,
            (
                "no check",
                "12 frames a second instead of 24",
                "64 pixels instead of 256",
                "4.0 s instead of 8.0",
            ),
        ),
    ],
)
def test_less_is_given_up_first_and_said(most_units: float, given_up: tuple[str, ...]) -> None:
    plan = fit(FULL, lambda plan: not plan.has_check and plan.units[ClipStage.VIDEO] <= most_units)
    assert plan is not None and plan.given_up == given_up


def test_a_size_that_buffers_do_not_hold_is_said() -> None:
    recipe = read_recipe({"schema": "1.0", "text": "Hi", "video": {"size": 512}})
    plan = asked_for(recipe, max_size=256, max_seconds=10)
    assert plan.size == 256 and plan.given_up == ("256 pixels instead of 512",)


def test_timeouts_follow_what_is_seen_within_bounds() -> None:
    times = StageTimes(BUDGETS[ClipStage.VIDEO], units=100.0)
    assert times.timeout_s(100) == 10 and times.likely_s(50) == 4
    assert times.timeout_s(200) == 20, "twice the work may take twice as long"
    for _ in range(20):
        times.observe(1.0, 100)
    assert times.likely_s(100) == pytest.approx(1.0)
    assert times.timeout_s(100) == 8, "not below the target"
    for _ in range(64):
        times.observe(30.0, 100)
    assert times.timeout_s(100) == 20, "not beyond twice the stated timeout"
    assert times.p95_ms == 30_000


def test_a_warm_up_says_how_fast_a_stage_is_until_enough_was_seen() -> None:
    times = StageTimes(BUDGETS[ClipStage.VIDEO], units=4.0)
    assert times.likely_s(2.0) == 4.0
    times.observe(9.0, 1.0)
    times.observe(0.1, 1.0)
    times.end_warm_up()
    assert times.likely_s(2.0) == pytest.approx(0.4)
    assert times.p95_ms is None
    times.observe(0.5, 1.0)
    assert times.likely_s(2.0) == pytest.approx(1.0)
    for _ in range(20):
        times.observe(0.05, 1.0)
    assert times.likely_s(2.0) == pytest.approx(0.1)


@for_each(
    ("a", "b", "passed", "outliers"),
    [
        ((0.9,) * 5, (0.9,) * 5, True, ()),
        ((0.69,) * 5, (0.9,) * 5, False, ()),
        ((0.9,) * 5, (0.71,) * 5, False, ()),
        ((0.95, 0.95, 0.7, 0.95, 0.95), (0.9,) * 5, False, (2,)),
    ],
)
def test_a_check_is_judged_by_both_models(
    a: tuple[float, ...], b: tuple[float, ...], passed: bool, outliers: tuple[int, ...]
) -> None:
    result = judge([ModelScore("a", a), ModelScore("b", b)])
    assert (result.passed, result.outliers) == (passed, outliers)
    assert result.score == pytest.approx(0.4 * sum(a) / 5 + 0.6 * sum(b) / 5)


def test_the_residency_plan_adds_up() -> None:
    *rows, total = residency_plan(
        [Resident("flux", 6_000_000_000, "bfloat16"), Resident("buffers", 600_000_000)]
    )
    figures = [float(row.split()[-2]) for row in rows]
    assert float(total.split()[-2]) == pytest.approx(sum(figures))
    assert "flux (bfloat16)" in rows[0]


@pytest.mark.parametrize(
    ("hard_bytes", "slots"), [(0, 4), (100, 4), (80, 3), (41, 1), (10, 1)], ids=str
)
def test_as_many_clips_as_there_is_memory_for(
    hard_bytes: int, slots: int, caplog: pytest.LogCaptureFixture
) -> None:
    assert clips_within(4, models_bytes=20, clip_bytes=20, hard_bytes=hard_bytes) == slots
    assert ("lower TIDEGATE_SLOT__SLOTS" in caplog.text) == (slots < 4)
