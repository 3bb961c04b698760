"""Work leaves instances that drain, without a lost or repeated token (OR-14)."""

import asyncio
from typing import Any

import pytest

from orchestrator import lifecycle
from tests.orchestrator.conftest import OPERATOR, MakeService, MakeWorker, Service
from tests.orchestrator.dispatch.test_retry import EXPECTED, TASK, run, speak, text_of, two
from tests.support.fake_worker import FakeWorker, Plan


async def begin_text(service: Service, worker: FakeWorker) -> "asyncio.Task[list[Any]]":
    """One that stands still after seven tokens."""
    held = Plan(speak=speak, stall_at=7)
    worker.plan = lambda submit: held
    running = asyncio.create_task(run(service, TASK))
    await service.until(lambda: _tokens_of(service) == 7)
    return running


def _tokens_of(service: Service) -> int:
    return sum(lane.tokens_total for i in service.orchestrator.registry for lane in i.lanes)


async def test_or14_a_text_that_cannot_end_before_the_drain_does_is_moved(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    """A planned move is no retry: neither tries nor their budget count."""
    service, first, second = await two(
        make_worker, make_service, {"can_continue": True}, ATTEMPTS=1, RETRY_SHARE=0.0
    )
    second.plan = lambda submit: Plan(speak=speak)
    running = await begin_text(service, first)
    await first.drain(left_ms=1e9)
    await service.until(lambda: any(i.draining for i in service.orchestrator.registry))
    service.parts.lifecycle._stages.dispatcher.upkeep()
    assert second.submits == []  # it has all the time that it may need
    await first.drain(left_ms=0.0)
    assert text_of(await running) == EXPECTED
    assert second.submits[0].begun_tokens == 7
    await first.until(lambda: len(first.cancels) == 1)
    assert service.outcomes() == ["met"]
    assert service.metric("tidegate_retries_total", kind="move") == 1


async def test_or14_what_an_instance_hands_back_waits_for_it_where_there_is_no_other(
    worker: FakeWorker, service: Service
) -> None:
    """The only one is restarted: nothing that was accepted fails."""
    (instance,) = service.orchestrator.registry
    held = Plan(begin=asyncio.Event())
    worker.plan = lambda submit: held
    running = asyncio.create_task(run(service, TASK))
    await worker.until(lambda: worker.running == 1)
    await worker.drain(left_ms=60_000.0)
    await service.until(lambda: instance.draining)
    worker.plan = lambda submit: Plan(speak=speak)
    await worker.hand_back()
    await service.until(lambda: len(service.orchestrator.queue) == 1)
    for lane in worker.lanes:
        lane.draining = False
    assert text_of(await running) == EXPECTED
    assert service.outcomes() == ["met"]


async def test_or14_an_operator_says_until_when_an_instance_is_to_be_free(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    service, first, second = await two(make_worker, make_service)
    second.plan = lambda submit: Plan(speak=speak)
    running = await begin_text(service, first)
    url = f"/v2/instances/{first.address}/drain"
    for bad in ({"grace_ms": -1}, {"grace_ms": "soon"}, {"grace": 1}):
        async with service.http.post(url, json=bad, headers=OPERATOR) as response:
            assert response.status == 400
            assert "grace" in (await response.json())["error"]["message"]
    async with service.http.post(url, json={"grace_ms": 0}, headers=OPERATOR) as response:
        assert (response.status, (await response.json())["draining"]) == (202, True)
    assert text_of(await running) == EXPECTED
    left = service.orchestrator.registry.instances[first.address]
    await service.until(lambda: left.lane_load == 0)  # its worker may have yet to say so
    async with service.http.get("/v2/instances") as response:
        jobs = {i["address"]: i["jobs"] for i in (await response.json())["instances"]}
    assert jobs[first.address] == 0
    async with service.http.post(url.replace("drain", "undrain"), headers=OPERATOR) as response:
        assert (await response.json())["draining"] is False


@pytest.mark.parametrize("grace_ms", [None, 60_000])
async def test_or14_an_orchestrator_drains_by_api_and_may_take_work_again(
    worker: FakeWorker, service: Service, grace_ms: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "COME_BACK_S", 0.1)
    running = await begin_text(service, worker)
    held = worker.plan(worker.submits[0])
    body = {"json": {"grace_ms": grace_ms}} if grace_ms else {}
    async with service.http.post("/admin/drain") as response:
        assert response.status == 401
    async with service.http.post("/admin/drain", headers=OPERATOR, **body) as response:
        told = await response.json()
        assert (response.status, told["status"], told["live_tasks"]) == (202, "draining", 1)
    async with service.http.get("/health/ready") as response:
        assert (response.status, (await response.json())["status"]) == (503, "draining")
    async with service.http.post("/v2/tasks", json=TASK) as response:
        assert (response.status, "Retry-After" in response.headers) == (503, True)
    held.release.set()
    assert text_of(await running) == EXPECTED
    await service.until(lambda: service.parts.lifecycle.is_drained)
    async with service.http.get("/admin/drain", headers=OPERATOR) as response:
        assert (await response.json())["status"] == "drained"
    async with service.http.post("/admin/undrain", headers=OPERATOR) as response:
        assert (await response.json())["status"] == "serving"
    worker.plan = lambda submit: Plan(speak=speak)
    assert text_of(await run(service, TASK)) == EXPECTED


async def test_or14_what_would_not_begin_before_the_end_is_told_at_once(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    """Its client can go elsewhere, while what runs has its grace."""
    worker = await make_worker(max_running=1)
    service = await make_service(worker, MOST_BACKLOG=0)
    running = await begin_text(service, worker)
    held = worker.plan(worker.submits[0])
    long = TASK | {"max_tokens": 400, "ignore_eos": True}
    waiting = asyncio.create_task(run(service, long))
    await service.until(lambda: len(service.orchestrator.queue) == 1)
    draining = asyncio.create_task(service.parts.lifecycle.drain(0.5))
    events = await waiting
    assert (events[-1].event, events[-1].json()["code"]) == ("error", "draining")
    assert events[-1].json()["retryable"] is True
    assert not running.done()
    held.release.set()
    await draining
    assert text_of(await running) == EXPECTED
