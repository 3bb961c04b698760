"""How many rows an instance should run: by deadlines, lengths, load and tenants."""

import math

import numpy as np
import pytest

from orchestrator.prediction.batch_size import (
    ABOUT_ALONE,
    MAX_REQUESTS,
    DemandArrays,
    RecentDemand,
    RecentRequest,
    best_rows,
    outlook,
    paced_outlook,
    row_counts,
)
from orchestrator.prediction.step_model import StepModel

SLOTS = 64
PACE = StepModel(SLOTS, 512, base_ms=2.5, row_ms=0.22, prompt_token_ms=0.1)
"""Sixteen rows take 6 ms a step, and make 2,660 tokens a second; 64 take 16.6, and make 3,860."""
SHORT, STORY = (18.0,) * 16, (180.0,) * 16


def demand(
    *lengths: tuple[float, ...], per_s: float, seconds: float = 2.0, **more: float
) -> DemandArrays:
    """Requests with these answers by turns, so many a second."""
    recent = RecentDemand()
    count = min(MAX_REQUESTS, round(per_s * seconds))
    for number in range(count):
        recent.add(
            RecentRequest(
                at=number / per_s,
                left=lengths[number % len(lengths)],
                prompt_tokens=more.get("prompt", 20.0),
                whole_ms=more.get("whole_ms", 2000.0),
                first_ms=more.get("first_ms", math.inf),
                weight=1.0,
                tenant=str(number % 12 // 11) if "tenants" in more else "",
            )
        )
    found = recent.demand(count / per_s)
    assert found is not None
    return found


def rows_for(asked: DemandArrays, current: int = SLOTS, **more: float) -> int:
    return best_rows(outlook(asked, PACE, row_counts(SLOTS), **more), current)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "least", "most"),
    [
        (demand(SHORT, STORY, per_s=5), SLOTS, SLOTS),  # light load
        (demand(SHORT, STORY, per_s=60), 12, 32),  # stories are late with 40 rows
        (demand(SHORT, STORY, per_s=60, whole_ms=1000.0), 4, 14),
        (demand(SHORT, STORY, per_s=60, whole_ms=60_000.0), SLOTS, SLOTS),
        (demand(STORY, per_s=60, whole_ms=math.inf), SLOTS, SLOTS),
        (demand(STORY, per_s=60, first_ms=1.0), SLOTS, SLOTS),  # nothing can be met
    ],
)
def test_rows_follow_deadlines_and_load(asked: DemandArrays, least: int, most: int) -> None:
    assert least <= rows_for(asked) <= most


def test_long_prompts_that_would_make_short_requests_late_are_left_out_of_account() -> None:
    """A worker computes them in what is left over; then short ones may have the rows they need."""
    recent = RecentDemand()
    for number in range(36):
        is_long = number % 9 == 8
        recent.add(
            RecentRequest(
                at=number / 9,
                left=SHORT if is_long else STORY,
                prompt_tokens=3000.0 if is_long else 20.0,
                whole_ms=4000.0 if is_long else 1000.0,
                first_ms=math.inf,
                weight=1.0,
                tenant="",
            )
        )
    asked = recent.demand(4.0)
    assert asked is not None
    rows = row_counts(SLOTS)
    as_they_come = outlook(asked, PACE, rows, prompt_share=0.3)
    paced = paced_outlook(asked, PACE, rows, prompt_share=0.3)
    assert paced.met.max() > 1.1 * as_they_come.met.max()
    assert best_rows(paced, SLOTS) >= 8 > best_rows(as_they_come, SLOTS)
    stories = demand(STORY, per_s=8, whole_ms=1000.0)
    assert stories.without_long_prompts(512) is None
    alike = paced_outlook(stories, PACE, rows)
    assert list(alike.met) == list(outlook(stories, PACE, rows).met)


def test_the_number_of_rows_is_about_the_best_in_what_it_promises() -> None:
    found = outlook(demand(SHORT, STORY, per_s=60), PACE, row_counts(SLOTS))
    chosen = best_rows(found, SLOTS)
    assert found.met_at(chosen) >= 0.97 * found.met.max()
    assert found.met_at(SLOTS) < 0.9 * found.met.max()
    assert list(found.step_ms) == sorted(found.step_ms)


def test_at_capacity_a_crowd_is_worked_off_by_more_rows_than_run_on_average() -> None:
    """28 a second need some 20 rows on average. With no more a burst is never worked off."""
    asked = demand(SHORT, STORY, per_s=28)
    assert rows_for(asked, current=16, prompt_share=0.1) == SLOTS
    found = outlook(asked, PACE, row_counts(SLOTS), prompt_share=0.1)
    assert found.met_at(16) < 0.97 * found.met_at(SLOTS)


def test_fewer_rows_are_better_the_less_of_their_time_goes_to_prompts() -> None:
    """Short answers to long prompts: each row more brings another prompt, and makes tokens wait."""
    asked = demand((7.0,) * 16, per_s=40, prompt=300.0, whole_ms=150.0)
    rows = row_counts(8)
    found = outlook(asked, PACE, rows)
    for _ in range(8):
        found = outlook(asked, PACE, rows, prompt_share=found.prompt_shares_at(rows, 4))
    assert found.prompt_share[0] < 0.65 and found.prompt_share[-1] > 0.8
    assert 2 <= best_rows(found, 8) <= 5 and found.met_at(3) > 2 * found.met_at(8)
    more = found.prompt_shares_at([1, 20, 64], current=64)
    assert list(more[1:]) == [found.prompt_share[-1]] * 2
    assert more[0] == (found.prompt_share[0] + found.prompt_share[-1]) / 2


@pytest.mark.parametrize("per_s", [2.0, 22.0, 30.0, 45.0, 90.0, 1000.0])
@pytest.mark.parametrize("whole_ms", [700.0, 2000.0, math.inf])
def test_what_would_be_met_is_a_number_of_requests(per_s: float, whole_ms: float) -> None:
    asked = demand(SHORT, STORY, per_s=per_s, whole_ms=whole_ms)
    met = outlook(asked, PACE, row_counts(SLOTS)).met
    assert np.isfinite(met).all() and (met >= 0).all() and (met <= len(asked.left)).all()


def test_a_small_gain_lowers_nothing_and_raises_at_once() -> None:
    found = outlook(demand(SHORT, STORY, per_s=60), PACE, row_counts(SLOTS))
    best = best_rows(found, 1)
    assert best_rows(found, best + 1) == best + 1
    assert best_rows(found, best - 1) == best


def test_rows_that_are_not_ours_and_jobs_of_before_count() -> None:
    asked = demand(SHORT, STORY, per_s=10)
    assert rows_for(asked) == SLOTS
    assert rows_for(asked, standing=100) < 40  # they would fill all slots
    crowded = demand(SHORT, STORY, per_s=60)
    assert rows_for(crowded, others=12) < rows_for(crowded)


def test_one_of_many_instances_has_its_share() -> None:
    asked = demand(SHORT, STORY, per_s=60)
    assert rows_for(asked, share=0.1) == SLOTS


def test_or24_others_rows_cost_a_tenant_next_to_nothing_that_keeps_to_its_share() -> None:
    """One of twelve requests is the small tenant's."""
    asked = demand(STORY, per_s=40, tenants=2)
    rows = row_counts(SLOTS)
    chosen = best_rows(outlook(asked, PACE, rows), SLOTS)
    small = asked.tenant == asked.tenant[11]
    alone = DemandArrays(
        *(
            getattr(asked, name)[small]
            for name in ("left", "prompt_tokens", "whole_ms", "first_ms")
        ),
        weight=asked.weight[small],
        tenant=np.zeros(small.sum(), dtype=np.int64),
        span_ms=asked.span_ms,
    )
    met = outlook(alone, PACE, rows, standing=SLOTS).met
    assert met[rows.index(chosen)] >= ABOUT_ALONE * met[2:].max() - 1e-9


def test_demand_is_a_window_as_long_as_deadlines_are() -> None:
    recent = RecentDemand()
    assert recent.demand(0.0) is None
    for at in range(10):
        recent.add(RecentRequest(float(at), SHORT, 10, 3000.0, math.inf, 1.0, ""))
    found = recent.demand(9.5)
    assert found is not None and len(found.left) == 3 and found.span_ms == 3000.0
    assert recent.demand(30.0) is None


@pytest.mark.parametrize("most", [1, 2, 7, 8, 9, 64, 256, 1000])
def test_numbers_of_rows_rise_to_all_of_them(most: int) -> None:
    rows = row_counts(most)
    assert rows[-1] == most and list(rows) == sorted(set(rows)) and rows[0] == 1
    assert len(rows) < 50
