"""Tasks are kept for replay, bounded by count, age and tokens."""

from contextlib import suppress

import pytest

from orchestrator.deadline import Deadline
from orchestrator.errors import NotFound
from orchestrator.store import TaskStore
from orchestrator.task import Api, Ending, Job, Task
from tests.orchestrator.clocks import ManualClock
from worker.protocol import Delta, FinishReason, Outcome, Sampling


def add(store: TaskStore, name: str) -> Task:
    job = Job(
        api=Api.NATIVE,
        model="m",
        sampling=Sampling(max_tokens=8),
        max_tokens=8,
        deadline=Deadline(1000.0, 0),
        correlation_id="c",
        arrived=100.0,
    )
    task = Task(name, job)
    store.add(task)
    return task


def end(task: Task, clock: ManualClock, tokens: int = 1) -> None:
    task.deliver(Delta(0, [1] * tokens, ["x"] * tokens), clock.now())
    task.end(Ending(Outcome.MET, FinishReason.STOP), clock.now())


def kept(store: TaskStore, *names: str) -> list[str]:
    found = []
    for name in names:
        with suppress(NotFound):
            found.append(store.get(name).id)
    return found


def test_count_age_and_tokens_bound_what_is_kept() -> None:
    clock = ManualClock()
    store = TaskStore(clock, max_tasks=2, max_age_s=60, max_tokens=10)
    running = add(store, "running")
    for name in "abc":
        end(add(store, name), clock)
    assert kept(store, "a", "b", "c", "running") == ["b", "c", "running"]
    end(add(store, "large"), clock, tokens=10)
    assert kept(store, "b", "c", "large") == ["large"]
    clock.advance(61)
    assert kept(store, "large", "running") == ["running"]
    end(running, clock)
    assert kept(store, "running") == ["running"]
    assert len(store) == 1


def test_an_unknown_task() -> None:
    with pytest.raises(NotFound, match="nothing"):
        TaskStore(ManualClock(), max_tasks=1, max_age_s=1, max_tokens=1).get("nothing")
