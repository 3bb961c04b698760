"""Plans are made again in small slices; a fault in one neither ends it nor costs the others."""

import logging

import pytest

from orchestrator.dispatch.replan import PAUSE_S, PLAN_EVERY_S, Replanner
from orchestrator.queue.task_queue import AT_ONCE, TaskQueue
from orchestrator.tasks.task import Task
from tests.orchestrator.placement.test_placement import task
from tests.support.clock import ManualClock


class Rig:
    def __init__(self, count: int) -> None:
        self.clock = ManualClock()
        self.queue: TaskQueue[Task] = TaskQueue(-1)
        self.begun: list[int] = []
        self.planned: list[tuple[float, str]] = []
        self.rounds: list[float] = []
        self.bad = ""
        self.fails_to_begin = 0
        self.replanner = Replanner(self.queue, self, self.clock, self.done)  # type: ignore[arg-type]
        for number in range(count):
            self.push(number)

    def push(self, number: int) -> Task:
        made = task()
        made.id = f"{number:03}"
        made.rank = float(number)
        self.queue.push(made)
        self.replanner.wake()
        return made

    def done(self) -> None:
        self.rounds.append(round(self.clock.now() - 100, 6))

    # what it asks of a forecaster

    def begin_plans(self, waiting: list[Task], now: float) -> None:
        self.begun.append(len(waiting))
        if self.fails_to_begin:
            self.fails_to_begin -= 1
            raise RuntimeError("a fault of ours")

    def plan(self, task: Task, now: float) -> None:
        if task.id == self.bad:
            raise RuntimeError("a fault of ours")
        self.planned.append((round(now - 100, 6), task.id))
        task.rank = -task.rank


def test_all_are_planned_in_slices_again_and_again() -> None:
    rig = Rig(40)
    rig.clock.advance(PLAN_EVERY_S + 2.5 * PAUSE_S)
    assert rig.begun == [40]
    slices = [sum(at == moment for at, _ in rig.planned) for moment in sorted(dict(rig.planned))]
    assert slices == [AT_ONCE, AT_ONCE, 8]
    assert len({name for _, name in rig.planned}) == 40
    assert rig.rounds == [round(PLAN_EVERY_S + 2 * PAUSE_S, 6)]
    assert [t.id for t in rig.queue] == [f"{i:03}" for i in reversed(range(40))]
    rig.queue.check_integrity()
    rig.clock.advance(10 * PLAN_EVERY_S)
    assert len(rig.begun) > 8


def test_it_sleeps_while_nothing_waits_and_wakes_once() -> None:
    rig = Rig(3)
    for waiting in rig.queue.tasks():
        rig.queue.take(waiting)
    rig.clock.advance(5.0)
    assert rig.begun == [0] and rig.planned == []
    assert rig.rounds == [PLAN_EVERY_S]  # something may wait inside a worker
    rig.begun.clear()
    rig.rounds.clear()
    rig.push(7)
    rig.replanner.wake()
    rig.clock.advance(1.5 * PLAN_EVERY_S)
    assert rig.begun == [1] and len(rig.rounds) == 1


def test_who_left_meanwhile_is_not_planned_and_who_came_is_in_the_next_round() -> None:
    rig = Rig(40)
    rig.clock.advance(PLAN_EVERY_S)
    planned = {name for _, name in rig.planned}
    gone = next(t for t in rig.queue.tasks() if t.id not in planned)
    rig.queue.remove(gone)
    rig.push(99)
    rig.clock.advance(3 * PAUSE_S)
    names = {name for _, name in rig.planned}
    assert gone.id not in names and "099" not in names
    rig.clock.advance(PLAN_EVERY_S)
    assert "099" in {name for _, name in rig.planned}


def test_a_fault_in_one_slice_does_not_end_it() -> None:
    rig = Rig(40)
    rig.bad = "005"
    with pytest.raises(RuntimeError):
        rig.clock.advance(PLAN_EVERY_S)
    rig.clock.advance(3 * PAUSE_S)
    assert len(rig.planned) >= 24
    assert len(rig.rounds) == 1
    rig.bad = ""
    rig.clock.advance(2 * PLAN_EVERY_S)
    assert "005" in {name for _, name in rig.planned}
    rig.queue.check_integrity()


def test_a_fault_at_the_beginning_does_not_end_it(caplog: pytest.LogCaptureFixture) -> None:
    rig = Rig(3)
    rig.fails_to_begin = 2
    with caplog.at_level(logging.ERROR):
        rig.clock.advance(3.5 * PLAN_EVERY_S)
    assert len(rig.planned) >= 3 and len(rig.rounds) >= 1
    assert "replanning failed" in caplog.text
