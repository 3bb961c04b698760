"""One task's trouble stays its own: it costs no other task its slot, lane or place (DL-10)."""

import asyncio

import pytest

from orchestrator.placement.placer import Choice
from orchestrator.tasks.metrics import TaskMetrics
from orchestrator.tasks.settle import Settler
from orchestrator.tasks.task import Task
from orchestrator.tasks.verdicts import aborted
from orchestrator.telemetry.metrics import Metrics
from protocol import AbortCause, Delta
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.orchestrator.tasks.test_settle import make_task
from tests.support.clock import ManualClock
from tests.support.fake_worker import FakeWorker, Plan

TASK = {"prompt": "hello", "max_tokens": 3}


class Deaf:
    """A listener with a fault."""

    def started(self, task: Task) -> None: ...

    def tokens(self, task: Task, delta: Delta) -> None: ...

    def ended(self, task: Task) -> None:
        raise RuntimeError("a fault of ours")


async def test_dl10_a_listener_that_fails_at_the_end_costs_no_count() -> None:
    """Limits, the store and the service's own set of live tasks hang on what comes after it."""
    metrics = TaskMetrics(Metrics(), ManualClock())
    task, called = make_task(tokens=2), []
    task.listen(Deaf())
    task.on_end += [Deaf().ended, called.append]
    assert Settler(metrics, ManualClock()).settle(task, aborted(AbortCause.CANCEL))
    assert called == [task]
    assert sum(metrics.settled.values()) == 1
    assert metrics.tokens_generated == 2


async def test_dl10_a_task_that_cannot_be_placed_fails_alone(
    service: Service, worker: FakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fault with one task neither breaks the lane that had room, nor keeps others waiting."""
    placer = service.parts.placer
    choose, bad = placer.choose, []

    def faulty(task: Task) -> Choice | None:
        if not bad or task in bad:
            bad.append(task)
            raise RuntimeError("a fault of ours")
        return choose(task)

    monkeypatch.setattr(placer, "choose", faulty)
    await service.ask("POST", "/v1/completions", 500, json=TASK | {"model": "fake"})
    await service.ask("POST", "/v1/completions", json=TASK | {"model": "fake"})
    assert sorted(service.outcomes()) == ["failed", "met"]
    assert service.orchestrator.live_tasks == len(service.orchestrator.queue) == 0
    assert len(worker.opens) == service.parts.settings.lanes.per_instance


async def test_or11_a_queue_that_can_go_nowhere_is_not_gone_through(
    make_worker: MakeWorker, make_service: MakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another model's instance has room: every frame asks, and nobody who waits can use it."""
    busy, idle = await make_worker(max_running=1, model="a"), await make_worker(model="b")
    busy.plan = lambda submit: Plan(stall_at=1)
    service = await make_service(busy, idle, MOST_BACKLOG=0)
    queue = service.orchestrator.queue
    for _ in range(20):
        await service.ask("POST", "/v2/tasks", 202, json=TASK | {"model": "a"})
    turns = []
    choose = queue._choose
    monkeypatch.setattr(queue, "_choose", lambda *how: turns.append(1) or choose(*how))
    service.orchestrator.stages.dispatcher.pump()
    assert len(turns) <= 2, "the first to start, the first to pause for"
    await service.ask("POST", "/v1/completions", json=TASK | {"model": "b"})


async def test_a_pump_that_fails_costs_no_lane(
    make_worker: MakeWorker, make_service: MakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lane's reader calls it: its other jobs must not pay for a fault in placement."""
    worker = await make_worker(max_running=1)
    plan = worker.does(Plan(stall_at=1))
    service = await make_service(worker, MOST_BACKLOG=0)
    first = asyncio.create_task(_complete(service))
    await worker.until(lambda: worker.running == 1)
    second = asyncio.create_task(_complete(service))
    await service.until(lambda: len(service.orchestrator.queue) == 1)
    placer, calls = service.parts.placer, []
    refresh = placer.refresh

    def fail_twice() -> None:
        calls.append(1)
        if len(calls) <= 2:
            raise RuntimeError("a fault of ours")
        refresh()

    monkeypatch.setattr(placer, "refresh", fail_twice)
    await service.until(lambda: len(calls) > 2)  # heartbeats alone
    plan.release.set()
    assert [await first, await second] == [200, 200]
    assert len(worker.opens) == service.parts.settings.lanes.per_instance


async def _complete(service: Service) -> int:
    async with service.http.post("/v1/completions", json=TASK | {"model": "fake"}) as response:
        await response.read()
        return response.status
