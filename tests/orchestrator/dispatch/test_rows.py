"""How many rows instances run at once, and how often that is decided."""

from collections.abc import Iterator
from typing import Any, cast

import pytest

from orchestrator.dispatch.rows import RowControl, best_rows
from orchestrator.prediction.schedule import ROWS_EVERY_S, row_counts
from orchestrator.tasks.job import Priority
from tests.support.admission import Rig
from tests.support.cases import for_each

ALL = 16


class NoInstances:
    """A registry that counts how often it is looked at, once for each decision."""

    decisions = 0

    def __iter__(self) -> Iterator[object]:
        self.decisions += 1
        return iter(())


def test_it_is_decided_while_something_runs_and_not_after() -> None:
    rig, registry, in_flight = Rig(), cast(Any, NoInstances()), cast(Any, ["a job"])
    rows = RowControl(registry, rig.prediction, in_flight, rig.clock, enabled=True)
    for _ in range(3):
        rows.wake(lambda: None)
    rig.clock.advance(10.5 * ROWS_EVERY_S)
    assert registry.decisions == 10
    in_flight.clear()
    rig.clock.advance(10 * ROWS_EVERY_S)
    assert registry.decisions == 11
    RowControl(registry, rig.prediction, in_flight, rig.clock, enabled=False).wake(print)
    rig.clock.advance(10 * ROWS_EVERY_S)
    assert registry.decisions == 11


def test_two_numbers_are_tried_for_each_doubling() -> None:
    assert row_counts(1) == (1,)
    assert row_counts(20) == (1, 2, 3, 4, 6, 8, 11, 16, 20)


@for_each(
    ("met", "current", "requests", "chosen"),
    [
        ((0.2, 0.5, 0.9, 0.4), 8, 100, 4),
        ((0.2, 0.5, 0.9, 0.4), 1, 100, 4),
        ((0.5, 0.88, 0.9, 0.89), 1, 100, 8),
        ((0.2, 0.5, 0.9, 0.85), 8, 50, 8),  # a change that is worth too little
        ((0.2, 0.5, 0.9, 0.85), 8, 100, 4),  # five of a hundred requests
        ((0.2, 0.5, 0.9, 0.7), 8, 4, 8),  # of four requests it may be chance
        ((0.0, 0.0, 0.0, 0.0), 2, 100, 8),
    ],
)
def test_the_largest_number_that_meets_about_the_most(
    met: tuple[float, ...], current: int, requests: int, chosen: int
) -> None:
    assert best_rows(dict(zip((1, 2, 4, 8), met, strict=True)), current, requests) == chosen


def waiting(rig: Rig, count: int, budget_ms: float, **job: Any) -> None:
    for _ in range(count):
        task = rig.task(budget_ms, **job)
        rig.forecaster.plan(task, rig.clock.now())
        rig.queue.push(task)


def met_with(rig: Rig, *rows: int, foreign: int = 0) -> list[float]:
    return list(rig.schedule.met_with("m", rows, foreign))


def test_a_burst_is_met_in_part_with_few_rows_and_not_at_all_with_many() -> None:
    """100 tokens take 1.3 s with 7 rows, 1.8 s with 16."""
    rig = Rig()
    waiting(rig, 32, 1500)
    met = dict(zip(row_counts(ALL), met_with(rig, *row_counts(ALL)), strict=True))
    assert met[ALL] == 0 < met[4] < met[8]
    assert best_rows(met, ALL, 32) == 8


def test_long_deadlines_leave_every_row() -> None:
    rig = Rig()
    waiting(rig, 32, 60_000)
    assert met_with(rig, ALL) == [1.0]
    assert met_with(Rig(), ALL) == []


def test_batch_work_counts_by_the_rows_that_it_fills() -> None:
    rig = Rig()
    waiting(rig, 4, 1500)
    assert met_with(rig, ALL) == [1.0]
    waiting(rig, 32, 60_000, priority=Priority.BATCH)
    assert met_with(rig, 4, ALL) == [1.0, 0.0]


def test_rows_that_are_not_ours_are_taken_off() -> None:
    rig = Rig()
    waiting(rig, 8, 1450)
    assert met_with(rig, 8) == [1.0]
    assert met_with(rig, 8, foreign=6)[0] < 0.5


def test_a_tenant_that_asks_for_most_does_not_outweigh_the_others() -> None:
    """With 16 rows the many long deadlines are kept, with 4 the few short ones."""
    rig = Rig()
    waiting(rig, 2, 1250, tenant="small")
    waiting(rig, 30, 100_000, tenant="large")
    few, many = met = met_with(rig, 4, ALL)
    assert few == 1.0 and many == pytest.approx(16 / 18), "two requests of an equal share of 16"
    assert best_rows(dict(zip((4, ALL), met, strict=True)), ALL, 1000) == 4
