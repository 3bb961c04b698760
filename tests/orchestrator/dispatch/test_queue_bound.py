"""OR-4: what becomes of work that finds the queue full."""

from collections.abc import Callable

import pytest

from orchestrator.errors import QueueFull
from orchestrator.queue.order import QueuePolicy
from orchestrator.tasks.job import Priority
from orchestrator.tasks.task import Task
from protocol import Outcome
from tests.support.admission import Rig
from tests.support.cases import for_each


def fill(rig: Rig, priority: Callable[[int], Priority], count: int = 4) -> list[Task]:
    tasks = [rig.task(60_000, priority=priority(i)) for i in range(count)]
    for task in tasks:
        rig.admit(task)
        rig.queue.push(task)
    return tasks


def test_or4_drop_lru_drops_the_oldest_batch_task() -> None:
    rig = Rig(load=16, bound=4, policy=QueuePolicy.DROP_LRU)
    tasks = fill(rig, lambda i: Priority.BATCH if i in (1, 2) else Priority.INTERACTIVE)
    for expected in (tasks[1], tasks[2]):
        newcomer = rig.task(60_000)
        rig.admit(newcomer)
        assert expected not in rig.queue
        assert expected.ending is not None and expected.ending.outcome is Outcome.REFUSED
        rig.queue.push(newcomer)
    with pytest.raises(QueueFull):
        rig.admit(rig.task(60_000))


def test_or24_interactive_work_takes_the_place_of_batch_work_which_is_told_when_to_come_again() -> (
    None
):
    rig = Rig(load=16, bound=4)
    tasks = fill(rig, lambda i: Priority.BATCH)
    newcomer = rig.task(60_000)
    rig.admit(newcomer)
    rig.queue.push(newcomer)
    (left,) = [task for task in tasks if task not in rig.queue]
    assert left.ending is not None and left.ending.outcome is Outcome.REFUSED
    error = left.ending.error
    assert isinstance(error, QueueFull) and error.retry_after_ms > 0
    with pytest.raises(QueueFull) as full:
        rig.admit(rig.task(60_000, priority=Priority.BATCH))
    assert full.value.retry_after_ms > 0  # how good it is: tests/perf/test_sim_reported.py


@for_each("policy", QueuePolicy)
def test_or5_a_durable_task_that_was_accepted_is_never_dropped(policy: QueuePolicy) -> None:
    rig = Rig(load=16, bound=4, policy=policy)
    for tenant in "aaab":
        task = rig.task(60_000, priority=Priority.BATCH, durable=True, tenant=tenant)
        rig.admit(task)
        rig.queue.push(task)
    with pytest.raises(QueueFull):
        rig.admit(rig.task(60_000, tenant="c"))
    assert len(rig.queue) == 4


def test_or24_durable_tasks_of_a_tenant_leave_places_to_others() -> None:
    rig = Rig(load=16, bound=8)
    for _ in range(6):
        task = rig.task(60_000, durable=True)
        rig.admit(task)
        rig.queue.push(task)
    with pytest.raises(QueueFull, match="of this tenant") as full:
        rig.admit(rig.task(60_000, durable=True))
    assert full.value.retry_after_ms > 0
    for changes in ({}, {}, {"tenant": "b"}, {"tenant": "b"}):
        task = rig.task(60_000, **changes)
        rig.admit(task)
        rig.queue.push(task)
    assert len(rig.queue) == 8 and sum(task.tenant == "b" for task in rig.queue.tasks()) == 2
