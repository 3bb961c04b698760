"""Instances that die, fall silent, drain, disagree or come back (OR-6, OR-10, OR-14)."""

import asyncio
import json

import pytest

from orchestrator.telemetry.narration import INSTANCE_STATES
from protocol import Delta
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.support.fake_worker import FakeWorker, Plan, make_card

TASK = {"prompt": "x", "max_tokens": 10}
CHAT = {"model": "fake", "messages": [{"role": "user", "content": "x"}], "max_tokens": 10}


def state_of(service: Service, index: int = 0) -> str:
    return list(service.orchestrator.registry)[index].state.value


@pytest.mark.parametrize("stream", [True, False])
async def test_an_instance_that_dies_before_the_first_token_is_a_503(
    service: Service, worker: FakeWorker, stream: bool
) -> None:
    worker.plan = lambda submit: Plan(die_at=0)
    body = CHAT | {"stream": stream}
    async with service.http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 503
        assert response.headers["x-should-retry"] == "true"
        assert int(response.headers["retry-after-ms"]) > 0
        assert (await response.json())["error"]["code"] == "instance_lost"
    assert service.outcomes() == ["failed"]


async def test_all_streams_of_a_lost_lane_are_told(service: Service, worker: FakeWorker) -> None:
    worker.plan = lambda submit: Plan(stall_at=2)

    async def one() -> str:
        body = CHAT | {"stream": True}
        async with service.http.post("/v1/chat/completions", json=body) as response:
            last = json.loads((await response.text()).split("\n\n")[-2][6:])
            return str(last["error"]["code"])

    streams = [asyncio.create_task(one()) for _ in range(16)]
    lane = next(iter(service.orchestrator.registry)).lanes[0]
    await service.until(lambda: lane.tokens_total == 32)
    await worker.stop()
    assert await asyncio.gather(*streams) == ["instance_lost"] * 16
    await service.until(lambda: state_of(service) == "connecting")
    await service.ask("GET", "/health/ready", 503)
    told = await service.ask("POST", "/v1/chat/completions", 503, json=CHAT)
    assert told["error"]["code"] == "not_ready"
    assert service.outcomes() == ["failed"] * 16 + ["refused"]


async def test_or6_silence_makes_suspect_then_down_then_a_new_lane(
    worker: FakeWorker, make_service: MakeService
) -> None:
    """OR-6: work is not sent to a suspect, and is given up on one that is down. What comes while it
    is not known to be gone waits for its next word."""
    service = await make_service(worker, SUSPECT_AFTER_S=0.3, DOWN_AFTER_S=60)
    worker.plan = lambda submit: Plan(stall_at=1)
    task = await service.ask("POST", "/v2/tasks", 202, json=TASK)
    await worker.until(lambda: worker.running == 1)
    worker.silent = True
    await service.until(lambda: state_of(service) == "suspect")
    await service.ask("GET", "/health/ready", 503)
    waiting = asyncio.create_task(service.http.post("/v1/chat/completions", json=CHAT))
    await service.until(lambda: len(service.orchestrator.queue) == 1)
    assert worker.running == 1
    service.leap(60)
    await service.until(lambda: state_of(service) == "down")
    await service.ask("POST", "/v1/chat/completions", 503, json=CHAT)
    last = (await service.follow(task["events_url"]))[-1]
    assert (last.event, last.json()["code"]) == ("error", "instance_lost")
    worker.plan = lambda submit: Plan()
    worker.silent = False
    async with await waiting as response:
        assert response.status == 200
    assert len(worker.opens) >= 2


async def test_or6_a_lane_that_falls_silent_alone_is_broken_off(
    worker: FakeWorker, make_service: MakeService, caplog: pytest.LogCaptureFixture
) -> None:
    """OR-6: its siblings' frames say nothing about its own jobs."""
    caplog.set_level("INFO")
    service = await make_service(
        worker, lanes__per_instance=2, SUSPECT_AFTER_S=0.3, DOWN_AFTER_S=0.9
    )
    instance = next(iter(service.orchestrator.registry))
    await service.until(lambda: all(lane.is_open for lane in instance.lanes))
    plan = worker.does(Plan(stall_at=1))
    for _ in range(2):
        await service.ask("POST", "/v2/tasks", 202, json=TASK)
    await worker.until(lambda: worker.running == 2)
    await service.until(lambda: [lane.tokens_total for lane in instance.lanes] == [1, 1])
    worker.lanes[0].silent = True
    await service.until(lambda: service.outcomes() == ["failed"])
    assert state_of(service) == "up"
    await worker.until(lambda: len(worker.opens) == 3)
    plan.release.set()
    await service.until(lambda: service.outcomes() == ["failed", "met"])
    await worker.stop()
    await service.until(lambda: state_of(service) == "connecting")
    levels = {record.getMessage(): record.levelname for record in caplog.records}
    assert levels[INSTANCE_STATES["up"].sentence] == "INFO"
    assert levels[INSTANCE_STATES["connecting"].sentence] == "WARNING"


async def test_or6_an_instance_whose_engine_is_stuck_is_suspect_though_it_speaks(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    """OR-6: work that waits there for its first token continues elsewhere; no new work comes."""
    stuck, well = await make_worker(), await make_worker()
    for one in (stuck, well):
        one.plan = lambda submit: Plan(stall_at=0)
    service = await make_service(stuck, well)
    await service.ask("POST", "/v2/tasks", 202, json=TASK)
    await service.until(lambda: stuck.running + well.running == 1)
    if well.running:
        stuck, well = well, stuck
    stuck.stuck_ms = 12_000.0
    index = [i.address for i in service.orchestrator.registry].index(stuck.address)
    await service.until(lambda: state_of(service, index) == "suspect")
    reason = list(service.orchestrator.registry)[index].reason
    assert reason == "its engine has been in one step for 12 s"
    await well.until(lambda: well.running == 1)
    stuck.stuck_ms = 0.0
    await service.until(lambda: state_of(service, index) == "up")


async def test_work_of_others_counts_as_load(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    worker = await make_worker(max_running=4, foreign=4)
    service = await make_service(worker, MOST_BACKLOG=0)
    assert (await service.ask("POST", "/v2/tasks", 202, json=TASK))["status"] == "queued"
    assert len(service.orchestrator.queue) == 1
    worker.foreign = 3
    await service.until(lambda: service.outcomes() == ["met"])


async def test_another_protocol_version_is_said_and_not_served(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    worker = await make_worker()
    worker.version = 99
    service = await make_service(worker, wait=False)
    await service.until(lambda: "version" in next(iter(service.orchestrator.registry)).reason)
    await service.ask("GET", "/health/ready", 503)


async def test_a_card_that_cannot_be_used_is_said(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    worker = await make_worker(tokenizer_json=b"{}")
    service = await make_service(worker, wait=False)
    instance = next(iter(service.orchestrator.registry))
    await service.until(lambda: instance.fault != "")
    (told,) = (await service.ask("GET", "/v2/instances"))["instances"]
    assert "tokenizer of fake cannot be read" in told["fault"]
    assert (told["state"], told["reason"]) == ("connecting", told["fault"])
    await service.until(lambda: b"cannot be read" in service.parts.health.ready.body)
    told = await service.ask("POST", "/v1/chat/completions", 503, json=CHAT)
    assert "tokenizer of fake cannot be read" in told["error"]["message"]


async def test_a_reload_with_a_bad_card_is_not_served_with_the_old_tokenizer(
    service: Service, worker: FakeWorker
) -> None:
    instance = next(iter(service.orchestrator.registry))
    good = worker.card
    worker.card = make_card(tokenizer_json=b"{}")
    instance.lanes[0].describe()
    await service.until(lambda: instance.fault != "")
    for _ in range(3):
        service.parts.monitor.check_heartbeats()
    assert state_of(service) == "connecting"
    worker.card = good
    instance.lanes[0].describe()
    await service.until_ready()
    assert instance.fault == ""


async def test_an_error_in_band_costs_one_job_only(
    worker: FakeWorker, make_service: MakeService
) -> None:
    service = await make_service(worker, ATTEMPTS=1)  # each pause takes seconds
    plans = [Plan(stall_at=1), Plan(in_band_error="unavailable")]
    worker.plan = lambda submit: plans[min(1, len(worker.submits) - 1)]
    await service.ask("POST", "/v2/tasks", 202, json=TASK)
    await worker.until(lambda: worker.running == 1)
    told = await service.ask("POST", "/v1/chat/completions", 503, json=CHAT)
    assert "unavailable" in told["error"]["message"]
    plans[0].release.set()
    await service.until(lambda: service.outcomes() == ["failed", "met"])
    assert len(worker.opens) == 1


async def test_a_missing_frame_breaks_the_lane_rather_than_losing_tokens(
    service: Service, worker: FakeWorker
) -> None:
    worker.does(Plan(stall_at=1))
    await service.ask("POST", "/v2/tasks", 202, json=TASK)
    await worker.until(lambda: worker.running == 1)
    worker.lanes[0].skip_a_frame()
    await service.until(lambda: service.outcomes() == ["failed"])
    await service.until_ready()
    assert len(worker.opens) == 2


async def test_a_fault_of_a_listener_costs_its_task_only(
    service: Service, worker: FakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    plan = worker.does(Plan(stall_at=1))
    tasks = []
    for _ in range(2):
        told = await service.ask("POST", "/v2/tasks", 202, json=TASK)
        tasks.append(service.orchestrator.store.get(told["task_id"]))
    await worker.until(lambda: worker.running == 2)

    class Broken:
        def started(self, task: object) -> None: ...

        def tokens(self, task: object, delta: Delta) -> None:
            raise ZeroDivisionError

        def ended(self, task: object) -> None: ...

    tasks[0].listen(Broken())
    plan.release.set()
    await service.until(lambda: len(service.outcomes()) == 2)
    assert [task.ending.outcome.value for task in tasks if task.ending] == ["failed", "met"]
    assert "handling a worker's message failed" in caplog.text
    assert len(worker.opens) == 1
