"""Work leaves instances that drain, without a lost or repeated token (OR-14)."""

import asyncio
from typing import Any

import pytest

from orchestrator import lifecycle
from tests.orchestrator.conftest import OPERATOR, MakeService, MakeTwo, MakeWorker, Service
from tests.orchestrator.dispatch.test_retry import EXPECTED, TASK, speak, text_of
from tests.support.fake_worker import FakeWorker, Plan


async def begin_text(service: Service, worker: FakeWorker) -> "asyncio.Task[list[Any]]":
    """One that stands still after seven tokens."""
    worker.does(Plan(speak=speak, stall_at=7))
    running = asyncio.create_task(service.run(TASK))
    await service.until(lambda: _tokens_of(service) == 7)
    return running


def _tokens_of(service: Service) -> int:
    return sum(lane.tokens_total for i in service.orchestrator.registry for lane in i.lanes)


async def test_or14_a_text_that_cannot_end_before_the_drain_does_is_moved(
    make_two: MakeTwo,
) -> None:
    """A planned move is no retry: neither tries nor their budget count."""
    service, first, second = await make_two({"can_continue": True}, ATTEMPTS=1, RETRY_SHARE=0.0)
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
    worker.does(Plan(begin=asyncio.Event()))
    running = asyncio.create_task(service.run(TASK))
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
    make_two: MakeTwo,
) -> None:
    service, first, second = await make_two()
    second.plan = lambda submit: Plan(speak=speak)
    running = await begin_text(service, first)
    url = f"/v2/instances/{first.address}/drain"
    for bad in ({"grace_ms": -1}, {"grace_ms": "soon"}, {"grace": 1}):
        error = await service.refused(400, url, json=bad, headers=OPERATOR)
        assert "grace" in error["message"]
    told = await service.ask("POST", url, 202, json={"grace_ms": 0}, headers=OPERATOR)
    assert told["draining"] is True
    assert text_of(await running) == EXPECTED
    left = service.orchestrator.registry.instances[first.address]
    await service.until(lambda: left.lane_load == 0)  # its worker may have yet to say so
    listed = (await service.ask("GET", "/v2/instances"))["instances"]
    jobs = {i["address"]: i["jobs"] for i in listed}
    assert jobs[first.address] == 0
    told = await service.ask("POST", url.replace("drain", "undrain"), 202, headers=OPERATOR)
    assert told["draining"] is False


@pytest.mark.parametrize("grace_ms", [None, 60_000])
async def test_or14_an_orchestrator_drains_by_api_and_may_take_work_again(
    worker: FakeWorker, service: Service, grace_ms: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "COME_BACK_S", 0.1)
    running = await begin_text(service, worker)
    held = worker.plan(worker.submits[0])
    body = {"json": {"grace_ms": grace_ms}} if grace_ms else {}
    await service.ask("POST", "/admin/drain", 401)
    told = await service.ask("POST", "/admin/drain", 202, headers=OPERATOR, **body)
    assert (told["status"], told["live_tasks"]) == ("draining", 1)
    assert (await service.ask("GET", "/health/ready", 503))["status"] == "draining"
    async with service.http.post("/v2/tasks", json=TASK) as response:
        assert (response.status, "Retry-After" in response.headers) == (503, True)
    held.release.set()
    assert text_of(await running) == EXPECTED
    await service.until(lambda: service.parts.lifecycle.is_drained)
    assert (await service.ask("GET", "/admin/drain", headers=OPERATOR))["status"] == "drained"
    assert (await service.ask("POST", "/admin/undrain", headers=OPERATOR))["status"] == "serving"
    worker.plan = lambda submit: Plan(speak=speak)
    assert text_of(await service.run(TASK)) == EXPECTED


async def test_or14_what_would_not_begin_before_the_end_is_told_at_once(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    """Its client can go elsewhere, while what runs has its grace."""
    worker = await make_worker(max_running=1)
    service = await make_service(worker, MOST_BACKLOG=0)
    running = await begin_text(service, worker)
    held = worker.plan(worker.submits[0])
    long = TASK | {"max_tokens": 400, "ignore_eos": True}
    waiting = asyncio.create_task(service.run(long))
    await service.until(lambda: len(service.orchestrator.queue) == 1)
    draining = asyncio.create_task(service.parts.lifecycle.drain(0.5))
    events = await waiting
    assert (events[-1].event, events[-1].json()["code"]) == ("error", "draining")
    assert events[-1].json()["retryable"] is True
    assert not running.done()
    held.release.set()
    await draining
    assert text_of(await running) == EXPECTED
