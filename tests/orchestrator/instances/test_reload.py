"""A model that Triton loads again or unloads under open lanes: the old instance's heartbeats go on,
and what is sent does not reach it any more."""

import asyncio

import pytest

from orchestrator.lanes import lane as lane_module
from orchestrator.lanes import reconnector
from tests.orchestrator.conftest import MakeService, Service
from tests.support.fake_worker import FakeWorker, Plan

TASK = {"prompt": "hello", "max_tokens": 4}


async def test_no_number_of_refused_jobs_runs_out_of_second_tries(
    worker: FakeWorker, service: Service
) -> None:
    """They never began, so the budget for what is done twice has nothing to say."""
    worker.generation += 1
    ends = await asyncio.gather(*(service.run(TASK) for _ in range(24)))
    assert [events[-1].event for events in ends] == ["end"] * 24
    assert len(worker.opens) == 2


async def test_one_stale_lane_is_enough_for_all_of_an_instance(
    worker: FakeWorker, make_service: MakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job must not try one after the other until its attempts are used up."""
    monkeypatch.setattr(reconnector, "FIRST_PAUSE_S", 0.6)
    service = await make_service(worker, lanes__per_instance=6)
    await service.until(lambda: len(worker.lanes) == 6)
    worker.generation += 1
    assert (await service.run(TASK))[-1].event == "end"
    await worker.until(lambda: len(worker.opens) == 12)


async def test_what_had_begun_on_the_old_instance_ends_once(
    worker: FakeWorker, service: Service
) -> None:
    """Its cancel could not reach it any more, so it is not left running there."""
    worker.plan = lambda submit: Plan(stall_at=2)
    begun = asyncio.create_task(service.run(TASK))
    await service.until(lambda: any(t.completion_tokens for t in service.orchestrator._live))
    worker.plan = lambda submit: Plan()
    worker.generation += 1
    assert (await service.run(TASK))[-1].event == "end"
    events = await begun
    assert [e.event for e in events].count("error") == 1
    assert events[-1].json()["code"] == "instance_lost"
    assert worker.running == 0


async def test_an_idle_lane_finds_out_by_itself(
    worker: FakeWorker, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the old engine stays in memory until somebody asks for something."""
    monkeypatch.setattr(lane_module, "PROBE_S", 0.05)
    await worker.until(lambda: worker.probes > 1)
    assert len(worker.opens) == 1, "a probe changes nothing"
    worker.generation += 1
    await worker.until(lambda: len(worker.opens) == 2)
    await service.until_ready()


async def test_an_unloaded_model_is_not_ready_and_its_streams_go_on(
    worker: FakeWorker, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_module, "PROBE_S", 0.05)
    plan = worker.does(Plan(stall_at=2))
    begun = asyncio.create_task(service.run(TASK))
    await service.until(lambda: any(t.completion_tokens for t in service.orchestrator._live))
    worker.is_unloaded = True
    await service.ask("POST", "/v1/completions", 503, json=TASK | {"model": "fake"})
    (instance,) = service.orchestrator.registry
    assert not instance.ready
    await service.until(lambda: service.parts.health.ready.status == 503)
    plan.release.set()
    assert (await begun)[-1].event == "end"
    await service.until(lambda: not any(lane.is_open for lane in instance.lanes))
    worker.plan = lambda submit: Plan()
    worker.is_unloaded = False
    await service.until_ready()
    assert (await service.run(TASK))[-1].event == "end"


async def test_lanes_are_opened_with_the_token(
    worker: FakeWorker, make_service: MakeService
) -> None:
    await make_service(worker, lanes__token="shared-secret")
    assert [message.token for message in worker.opens] == ["shared-secret"]
