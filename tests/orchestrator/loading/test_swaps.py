"""WK-7 through the orchestrator: an instance gets another model, and no stream is dropped."""

import asyncio
import json
from typing import Any

import msgspec
import pytest

from orchestrator.errors import InstanceLost
from orchestrator.loading.swaps import MAX_GRACE_S, MOVING_GRACE_S
from tests.orchestrator.conftest import OPERATOR, MakeService, MakeWorker, Service
from tests.support.cases import for_each
from tests.support.fake_worker import FakeWorker, Plan

CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 8}


def chat(model: str, **more: object) -> dict[str, object]:
    return CHAT | {"model": model} | more


async def swap(service: Service, worker: FakeWorker, **body: object) -> tuple[int, Any]:
    path = f"/v2/instances/{worker.address}/swap"
    return await service.answer("POST", path, json=body, headers=OPERATOR)


async def described(service: Service) -> dict[str, object]:
    (instance,) = (await service.ask("GET", "/v2/instances"))["instances"]
    return dict(instance)


async def models(service: Service) -> dict[str, str]:
    return {one["id"]: one["state"] for one in (await service.ask("GET", "/v1/models"))["data"]}


async def test_wk7_an_instance_serves_another_model_on_the_lanes_that_it_has(
    worker: FakeWorker, make_service: MakeService
) -> None:
    service = await make_service(worker, lanes__per_instance=2)
    status, told = await swap(service, worker, model="other", wait=True)
    assert (status, told["phase"], told["model"], told["error"]) == (200, "done", "other", None)
    assert len(worker.opens) == 2, "no lane was opened again"
    await service.ask("POST", "/v1/chat/completions", json=chat("other"))
    assert worker.submits[-1].serving == 1
    instance = await described(service)
    assert instance["model"] == "other" and instance["loadable"] == ["fake", "other"]
    assert service.metric("tidegate_model_swaps_total", result="done") == 1


async def _streamed(service: Service, model: str) -> int:
    """Tokens of one stream that was not dropped."""
    tokens = 0
    body = chat(model, stream=True)
    async with service.http.post("/v1/chat/completions", json=body) as response:
        assert response.status == 200
        for line in (await response.text()).split("\n\n"):
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                tokens += bool(event["choices"] and event["choices"][0]["delta"].get("content"))
    return tokens


async def test_wk7_what_runs_may_end_or_is_moved(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    """Jobs end by their deadlines, and the drain with the last of them; but what another instance
    continues need not end."""
    pair = await make_worker(), await make_worker()
    for one in pair:
        one.can_load("other")
    service = await make_service(*pair)
    first, last = pair
    assert (await swap(service, first, model="other", wait=True))[0] == 200
    assert first.swaps[0].grace_ms == 1000 * MOVING_GRACE_S
    assert (await swap(service, last, model="other", wait=True))[0] == 200
    assert last.swaps[0].grace_ms == 1000 * MAX_GRACE_S, "though nothing ran"
    assert (await swap(service, first, model="fake", grace_ms=1500, wait=True))[0] == 200
    assert first.swaps[1].grace_ms <= 1500, "as it was asked for"


async def test_wk7_what_comes_while_the_only_instance_swaps_waits_for_it(
    worker: FakeWorker, service: Service
) -> None:
    """A new version under the old name."""
    worker.models["v2"] = msgspec.structs.replace(worker.card, model_digest="v2")
    worker.swap_s = 0.3
    settings = {"model_path": "/models/v2", "model_name": "fake"}
    running = service.orchestrator.stages.swaps.start(worker.address, settings)
    await service.until(lambda: next(iter(service.orchestrator.registry)).draining)
    assert await _streamed(service, "fake") == 8
    await running.wait()
    assert worker.submits[-1].serving == 1
    assert service.outcomes() == ["met"]


async def test_wk7_what_waits_for_the_models_last_instance_is_served_first(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    worker = await make_worker(max_running=1)
    worker.can_load("other")
    service = await make_service(worker, MOST_BACKLOG=0)
    plan = worker.does(Plan(stall_at=3))
    first = asyncio.create_task(_streamed(service, "fake"))
    await worker.until(lambda: worker.running == 1)
    second = asyncio.create_task(_streamed(service, "fake"))
    await service.until(lambda: len(service.orchestrator.queue) == 1)
    await swap(service, worker, model="other")
    plan.release.set()
    assert await first == await second == 8
    await service.until(lambda: not service.orchestrator.stages.swaps.leaving())
    assert [submit.serving for submit in worker.submits] == [0, 0]


async def test_wk7_a_model_that_cannot_be_loaded_leaves_the_old_one_and_says_why(
    worker: FakeWorker, service: Service
) -> None:
    worker.swap_error = "its weights are corrupt"
    status, told = await swap(service, worker, model="other", wait=True)
    assert status == 409
    assert told["error"]["code"] == "swap_failed"
    assert "corrupt" in str(told)
    await service.until_ready()
    await service.ask("POST", "/v1/chat/completions", json=chat("fake"))
    latest = (await described(service))["swap"]
    assert isinstance(latest, dict) and latest["phase"] == "failed"


async def reload(service: Service, worker: FakeWorker, **body: object) -> tuple[int, Any]:
    path = f"/v2/instances/{worker.address}/reload"
    return await service.answer("POST", path, json=body or None, headers=OPERATOR)


async def test_or2_an_instance_loads_its_model_again(worker: FakeWorker, service: Service) -> None:
    """What runs there ends first, and what comes meanwhile waits."""
    plan = worker.does(Plan(stall_at=1))
    running = asyncio.create_task(_streamed(service, "fake"))
    await worker.until(lambda: worker.running == 1)
    assert (await reload(service, worker))[0] == 202
    await worker.until(lambda: worker.lanes[0].draining)
    assert (await swap(service, worker, model="fake"))[0] == 503, "a reload is no swap"
    worker.plan = lambda job: Plan()
    waiting = asyncio.create_task(_streamed(service, "fake"))
    joined = asyncio.create_task(reload(service, worker, wait=True))
    await service.until(lambda: len(service.orchestrator.queue) == 1)
    plan.release.set()
    assert await running == await waiting == 8
    status, told = await joined
    assert (status, told["model"]) == (200, "fake")
    assert [submit.serving for submit in worker.submits] == [0, 1]
    assert len(worker.swaps) == 1
    worker.swap_error = "its weights are corrupt"
    status, told = await reload(service, worker, wait=True, grace_ms=1000)
    assert status == 409 and "corrupt" in str(told)
    assert (await reload(service, worker, model="other"))[0] == 400


@for_each(
    ("body", "word"),
    [
        ({}, "model"),
        ({"model": "unheard", "wait": True}, "knows no model"),
        ({"model": "a", "settings": {"model_name": "b"}}, "model_name"),
        ({"back": True}, "back"),
        ({"model": "a", "grace_ms": -1}, "grace_ms"),
    ],
)
async def test_wk7_what_makes_no_sense_is_refused(
    worker: FakeWorker, service: Service, body: dict[str, object], word: str
) -> None:
    status, told = await swap(service, worker, **body)
    assert status == 400 and word in str(told)


async def test_wk7_an_instance_that_dies_in_the_middle_fails_the_swap_only(
    worker: FakeWorker, make_worker: MakeWorker, service: Service
) -> None:
    worker.swap_s = 60.0
    running = service.orchestrator.stages.swaps.start(worker.address, {"model_name": "other"})
    await worker.until(lambda: len(worker.swaps) == 1)
    await worker.stop()
    with pytest.raises(InstanceLost):
        await running.wait()
    again = await make_worker(port=worker.port)
    again.can_load("other")
    await service.until_ready()
    status, _ = await swap(service, again, model="other", wait=True)
    assert status == 200


async def test_wk7_an_orchestrator_that_is_killed_in_the_middle_leaves_the_worker_at_it(
    worker: FakeWorker, make_service: MakeService
) -> None:
    """The next one finds the worker draining, and then its new model."""
    worker.swap_s = 0.2
    service = await make_service(worker)
    running = service.orchestrator.stages.swaps.start(worker.address, {"model_name": "other"})
    await worker.until(lambda: len(worker.swaps) == 1)
    assert running.task is not None
    running.task.cancel()
    successor = await make_service(worker)
    await successor.until(lambda: "other" in successor.orchestrator.models.by_name())
    await successor.until_ready()
    await successor.ask("POST", "/v1/chat/completions", json=chat("other"))
