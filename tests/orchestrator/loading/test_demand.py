"""A model that nobody serves is loaded when it is asked for, if the request can wait for it."""

import asyncio
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest

from orchestrator.admission.reader import PromptReader
from orchestrator.loading import demand
from orchestrator.prediction.step_model import Work
from orchestrator.tasks.task import Task
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.orchestrator.loading.test_swaps import chat, models
from tests.support.fake_worker import FakeWorker, Plan

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


async def ask(
    service: Service, model: str, timeout_ms: int = 30_000, **changes: object
) -> tuple[int, object]:
    headers = {"X-Timeout-Ms": str(timeout_ms)}
    return await service.answer(
        "POST", "/v1/chat/completions", json=chat(model) | changes, headers=headers
    )


async def test_a_model_is_loaded_when_it_is_asked_for_once_for_all_who_wait(
    worker: FakeWorker, service: Service
) -> None:
    worker.swap_s = 0.1
    assert await models(service) == {"fake": "loaded", "other": "loadable"}
    asked = [asyncio.create_task(ask(service, "other")) for _ in range(5)]
    await worker.until(lambda: len(worker.swaps) == 1)
    assert (await models(service))["other"] == "loading"
    assert [status for status, _ in await asyncio.gather(*asked)] == [200] * 5
    assert len(worker.swaps) == 1
    assert await models(service) == {"fake": "loadable", "other": "loaded"}
    assert service.metric("tidegate_model_loads_total", result="done") == 1
    assert service.metric("tidegate_model_evictions_total") == 1
    assert service.outcomes() == ["met"] * 5


async def test_dl7_the_earliest_deadline_has_the_load_and_then_the_request_itself(
    worker: FakeWorker, make_service: MakeService
) -> None:
    """By the speed that the model was last seen to have; a longer answer takes longer."""
    worker.can_load("other", load_ms=20_000.0)
    worker.step_ms = 40.0
    service = await make_service(worker, MIN_RESIDENCY_S=0.0)
    forecaster = service.orchestrator.stages.prediction.forecaster
    swaps = service.orchestrator.stages.swaps
    for _ in range(3):
        assert (await ask(service, "fake", 60_000))[0] == 200
    swaps.load_ms["other"] = deque([10.0])
    assert (await ask(service, "other", 60_000))[0] == 200
    swaps.load_ms["fake"] = deque([20_000.0])

    async def refusal(max_tokens: int) -> tuple[float, float]:
        body = chat("fake") | {"max_tokens": max_tokens, "ignore_eos": True}
        headers = {"X-Timeout-Ms": "5000"}
        at = 1000 * service.orchestrator.clock.unix()
        path = "/v1/chat/completions"
        error = await service.refused(504, path, json=body, headers=headers)
        assert error["binding_constraint"] == "model_load"
        return error["predicted_finish_ms"], error["earliest_feasible_deadline"] - at

    speed = forecaster.known_speed["fake"]
    short_ms, short_by_ms = await refusal(1)
    long_ms, long_by_ms = await refusal(2001)
    more_ms = speed.service_ms(Work(1, 0, 2001), 1) - speed.service_ms(Work(1, 0, 1), 1)
    # No worker starts with less than its floor left, which the short one is below.
    assert long_ms - short_ms == pytest.approx(more_ms, abs=200) and more_ms > 300
    assert short_ms > 20_000 and long_by_ms >= long_ms and short_by_ms >= short_ms


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"input": "x", "max_output_tokens": 4}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [TOOL]}),
    ],
)
async def test_dl7_who_cannot_wait_for_the_load_is_refused_at_once_and_nothing_is_loaded(
    worker: FakeWorker, make_service: MakeService, path: str, body: dict[str, object]
) -> None:
    """DL-10: offered and refused once on the routes that need the model before they can make a
    task, too."""
    worker.can_load("other", load_ms=20_000.0)
    service = await make_service(worker)
    before = time.time()
    asked = {"model": "other"} | body
    error = await service.refused(504, path, json=asked, headers={"X-Timeout-Ms": "3000"})
    assert (error["code"], error["binding_constraint"]) == ("deadline_infeasible", "model_load")
    assert error["predicted_finish_ms"] > 20_000.0, "the load, and the request itself"
    assert error["earliest_feasible_deadline"] > 1000 * (before + 20)
    assert worker.swaps == []
    assert service.outcomes() == ["refused"]
    assert service.metric("tidegate_model_load_refused_total") == 1
    await service.ask("POST", path, 404, json=asked | {"model": "unheard"})
    assert service.outcomes() == ["refused"] * 2
    assert service.orchestrator.live_tasks == 0


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/completions"])
async def test_or21_one_that_waits_for_its_model_is_listed_and_stopped_at_once(
    worker: FakeWorker, service: Service, path: str
) -> None:
    """Also where there can be no task before the model is there."""
    worker.swap_s = 60.0
    body = {"model": "other", "input" if "responses" in path else "prompt": "x"}
    asked = asyncio.create_task(service.http.post(path, json=body))
    await service.until(lambda: service.orchestrator.stages.demand.waiting == 1)
    (line,) = (await service.ask("GET", "/v2/tasks"))["tasks"]
    await service.ask("DELETE", f"/v2/tasks/{line['correlation_id']}", 202)
    async with await asked as response:
        assert response.status == 499
    assert service.outcomes() == ["aborted"]
    assert service.orchestrator.live_tasks == 0


async def test_a_load_that_fails_is_told_and_not_tried_for_each_request(
    worker: FakeWorker, service: Service
) -> None:
    worker.swap_error = "its weights are corrupt"
    for _ in range(2):
        status, body = await ask(service, "other")
        assert status == 503 and "corrupt" in str(body)
    assert len(worker.swaps) == 1
    status, _ = await ask(service, "fake")
    assert status == 200, "what was there is there"


async def test_a_model_that_nobody_knows_is_no_model(
    worker: FakeWorker, make_service: MakeService
) -> None:
    service = await make_service(worker)
    status, body = await ask(service, "unheard")
    assert status == 404 and "unheard" in str(body)
    switched_off = await make_service(worker, loading__on_demand=False)
    status, _ = await ask(switched_off, "other")
    assert status == 404
    assert worker.swaps == []


async def test_what_waits_for_a_model_that_was_taken_brings_it_back(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    """An operator swapped it away while a task waited for it."""
    worker = await make_worker(max_running=1)
    worker.can_load("other")
    service = await make_service(worker, MOST_BACKLOG=0, MIN_RESIDENCY_S=0.0)
    plan = worker.does(Plan(stall_at=1))
    first = asyncio.create_task(ask(service, "fake"))
    await worker.until(lambda: worker.running == 1)
    second = asyncio.create_task(ask(service, "fake"))
    await service.until(lambda: len(service.orchestrator.queue) == 1)
    service.orchestrator.stages.swaps.start(worker.address, {"model_name": "other"}, 0.0)
    await worker.until(lambda: len(worker.swaps) == 1)
    plan.release.set()
    assert [(await one)[0] for one in (first, second)] == [200, 200]
    assert [swap.settings["model_name"] for swap in worker.swaps] == ["other", "fake"]


async def test_a_durable_task_of_an_earlier_process_has_its_model_loaded(
    worker: FakeWorker, make_service: MakeService, tmp_path: Path
) -> None:
    """It was let in while the model was served; the next process finds another one there."""
    journal = {"journal__path": str(tmp_path / "journal.db")}
    plan = worker.does(Plan(stall_at=1))
    first = await make_service(worker, **journal)
    body = {"model": "fake", "prompt": "x", "max_tokens": 4, "durable": True, "deadline_ms": 30_000}
    await first.ask("POST", "/v2/tasks", 202, json=body)
    await worker.until(lambda: worker.running == 1)
    await first.parts.lifecycle.drain(0.0)
    await first.parts.lifecycle.close()
    plan.release.set()
    worker.card = worker.models["other"]
    second = await make_service(worker, **journal)
    await worker.until(lambda: len(worker.submits) == 2)
    assert [swap.settings["model_name"] for swap in worker.swaps] == ["fake"]
    await second.until(lambda: second.outcomes() == ["met"])


async def test_or24_a_tenant_leaves_places_to_wait_for_loads_to_others(
    worker: FakeWorker, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demand, "MAX_WAITING", 4)
    worker.swap_s = 0.2
    loud = [asyncio.create_task(ask(service, "other", tenant="loud")) for _ in range(3)]
    await service.until(lambda: service.orchestrator.stages.demand.waiting == 3)
    status, body = await ask(service, "other", tenant="loud")
    assert status == 429 and "3 requests of this tenant" in str(body)
    assert (await ask(service, "other", tenant="calm"))[0] == 200
    assert [(await each)[0] for each in loud] == [200] * 3


async def test_or24_a_tenant_that_asks_for_many_models_leaves_others_theirs(
    worker: FakeWorker, make_service: MakeService
) -> None:
    """A model that is idle at this moment is in use all the same; one alone waits for nothing."""
    worker.can_load("other", "third")
    service = await make_service(worker)
    for model in ("other", "third", "other", "fake"):
        assert (await ask(service, model, tenant="loud"))[0] == 200
    assert len(worker.swaps) == 4
    assert (await ask(service, "fake", tenant="calm"))[0] == 200
    assert (await ask(service, "other", tenant="loud"))[0] == 200
    assert (await ask(service, "fake", tenant="calm"))[0] == 200
    assert len(worker.swaps) == 6
    loud = asyncio.create_task(ask(service, "third", timeout_ms=60_000, tenant="loud"))
    await service.until(lambda: service.orchestrator.stages.demand.waiting == 1)
    for _ in range(3):
        await asyncio.sleep(demand._LOOK_S)
        assert (await ask(service, "fake", tenant="calm"))[0] == 200
    assert len(worker.swaps) == 6 and not loud.done()
    service.leap(demand.MIN_RESIDENCY_S)
    assert (await loud)[0] == 200 and len(worker.swaps) == 7


@pytest.mark.parametrize("path", ["/v1/models/other", "/v1/models/fake"])
async def test_a_model_that_could_be_loaded_is_listed(
    worker: FakeWorker, make_service: MakeService, path: str
) -> None:
    worker.can_load("other", size=1234)
    service = await make_service(worker)
    body = await service.ask("GET", path)
    assert body["bytes"] == 1234
    assert (body["max_model_len"] is None) is (body["state"] == "loadable")


async def test_dl7_a_load_that_is_nearly_over_refuses_nobody(
    worker: FakeWorker, make_service: MakeService
) -> None:
    worker.can_load("other", load_ms=20_000.0)
    worker.swap_s = 60.0
    service = await make_service(worker)
    first = asyncio.create_task(ask(service, "other", timeout_ms=50_000))
    await worker.until(lambda: len(worker.swaps) == 1)
    _, body = await ask(service, "other", timeout_ms=300)
    assert "deadline_infeasible" in str(body)
    service.orchestrator.stages.swaps.latest[worker.address].began_at -= 19.0
    _, body = await ask(service, "other", timeout_ms=300)
    assert "deadline_exceeded" in str(body), "it was worth waiting for"
    assert service.orchestrator.stages.demand.refused == 1
    first.cancel()


async def test_a_drain_tells_those_who_wait_for_a_load(
    worker: FakeWorker, service: Service
) -> None:
    worker.swap_s = 60.0
    asked = asyncio.create_task(ask(service, "other"))
    await worker.until(lambda: len(worker.swaps) == 1)
    await service.parts.lifecycle.drain(0.0)
    status, body = await asked
    assert status == 503 and "draining" in str(body)
    asked_now = {"model": "other", "input": "x", "max_output_tokens": 4}
    assert "draining" in str(await service.ask("POST", "/v1/responses", 503, json=asked_now))
    assert service.outcomes() == ["failed", "refused"]


async def test_a_request_whose_prompt_is_being_read_keeps_the_model_that_it_waited_for(
    worker: FakeWorker, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, go_on = asyncio.Event(), asyncio.Event()
    real = PromptReader._encode

    async def slowly(self: PromptReader, task: Task, *rest: Any) -> Any:
        if task.model == "other":
            reading.set()
            await go_on.wait()
        return await real(self, task, *rest)

    monkeypatch.setattr(PromptReader, "_encode", slowly)
    first = asyncio.create_task(ask(service, "other"))
    await reading.wait()
    second = asyncio.create_task(ask(service, "fake"))
    await service.until(lambda: service.orchestrator.stages.demand.waiting == 1)
    await asyncio.sleep(0.1)
    assert len(worker.swaps) == 1
    go_on.set()
    assert [(await one)[0] for one in (first, second)] == [200, 200]


async def test_who_is_at_its_limit_has_no_model_loaded(
    worker: FakeWorker, make_service: MakeService
) -> None:
    service = await make_service(worker, limits__each_key__concurrent=1)
    plan = worker.does(Plan(stall_at=1))
    running = asyncio.create_task(ask(service, "fake"))
    await worker.until(lambda: worker.running == 1)
    await service.ask(
        "POST", "/v1/responses", 429, json={"model": "other", "input": "x", "max_output_tokens": 4}
    )
    assert worker.swaps == []
    plan.release.set()
    assert (await running)[0] == 200


async def test_a_model_whose_instance_was_taken_out_of_use_is_loaded_elsewhere(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    out, other = await make_worker(model="first"), await make_worker(model="second")
    out.can_load("second")
    other.can_load("first")
    service = await make_service(out, other)
    service.orchestrator.registry.cordon(out.address)
    assert (await ask(service, "first"))[0] == 200
    assert (out.swaps, len(other.swaps)) == ([], 1)
    service.orchestrator.registry.cordon(other.address)
    status, body = await ask(service, "first")
    assert status == 503 and "not_ready" in str(body), "nobody could load it: told at once"
