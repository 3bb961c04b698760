"""Tasks are kept for replay, bounded by count, age and bytes."""

import math
from contextlib import suppress
from typing import Any

from orchestrator.errors import NotFound
from orchestrator.retention import Retention
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.job import OnDisconnect, PlacementConstraint, PlacementMode
from orchestrator.tasks.task import Task, TaskStore
from orchestrator.tasks.transcript import TASK_BYTES, TOKEN_BYTES
from protocol import Delta, FinishReason, Outcome, Sampling
from tests.support.clock import ManualClock
from tests.support.jobs import make_job


def a_task(name: str, **changes: Any) -> Task:
    return Task(name, make_job(**changes))


def add(store: TaskStore, name: str) -> Task:
    task = a_task(name)
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


def test_the_latest_end_is_of_those_whose_clients_may_come_back() -> None:
    clock = ManualClock()
    store = TaskStore(clock, Retention(keep_count=9, keep_s=60, keep_bytes=10**6))
    end(add(store, "goes with its client"), clock)
    assert store.latest_end == -math.inf
    task = a_task("continues", on_disconnect=OnDisconnect.CONTINUE)
    store.add(task)
    clock.advance(5)
    end(task, clock)
    assert store.latest_end == clock.now()
    clock.advance(5)
    durable = Task("durable", task.job)
    durable.entry = object()  # type: ignore[assignment]
    store.add(durable)
    end(durable, clock)
    assert store.latest_end == clock.now() - 5, "the next process has it"


def test_count_age_and_bytes_bound_what_is_kept() -> None:
    clock = ManualClock()
    store = TaskStore(
        clock, Retention(keep_count=2, keep_s=60, keep_bytes=2 * TASK_BYTES + 10 * TOKEN_BYTES)
    )
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


def test_no_key_displaces_what_others_keep() -> None:
    """OR-24."""
    clock = ManualClock()
    store = TaskStore(clock, Retention(keep_count=3, keep_s=60, keep_bytes=10**6))
    quiet = a_task("quiet", key="quiet")
    store.add(quiet)
    end(quiet, clock)
    for name in "abcd":
        end(add(store, name), clock)
    assert kept(store, "quiet", "a", "b", "c", "d") == ["quiet", "c", "d"]
    assert [task.id for task in store.ended()][-1] == "quiet"


def test_what_a_client_states_counts() -> None:
    plain = a_task("a").kept_bytes
    biased = Sampling(max_tokens=8, logit_bias=tuple((i, 1.0) for i in range(512)))
    assert a_task("a", sampling=biased).kept_bytes > plain + 512 * 100
    assert (
        a_task("a", sampling=Sampling(max_tokens=8, stop=("x" * 256,) * 16)).kept_bytes
        > plain + 4096
    )
    wish = PlacementConstraint(PlacementMode.AVOID, ("x" * 100_000,))
    assert a_task("a", placement=wish).kept_bytes > plain + 100_000
