"""What is recorded of requests: bounded, and not a word of them."""

from typing import Any

import pytest

from orchestrator import recorder
from tests.orchestrator.conftest import OPERATOR, MakeService, MakeWorker, Service
from tests.orchestrator.dispatch.test_pausing import scene
from tests.support.fake_worker import FakeWorker


async def recording_of(service: Service) -> dict[str, Any]:
    async with service.http.get("/admin/recording", headers=OPERATOR) as response:
        assert response.status == 200, await response.text()
        told: dict[str, Any] = await response.json()
        return told


async def requests_of(service: Service) -> list[dict[str, Any]]:
    return list((await recording_of(service))["requests"])


async def complete(service: Service, status: int = 200, **body: object) -> None:
    asked = {"prompt": "a secret", "max_tokens": 5} | body
    await service.ask("POST", "/v1/completions", status, json=asked)


async def test_what_is_recorded_holds_no_content(service: Service) -> None:
    await complete(service, user="a-secret-tenant")
    recording = await recording_of(service)
    (request,) = recording["requests"]
    told = [request[name] for name in ("outcome", "tokens", "prompt_tokens")]
    assert told == ["met", 5, 8]
    marks = request["marks"]
    times = [marks[name] for name in ("received", "dispatched", "first_token", "ended")]
    assert times == sorted(times)
    assert len(request["left"]) == 16 and request["left"] == sorted(request["left"])
    assert "secret" not in str(recording) and "w0" not in str(recording)
    names = {one["name"] for one in recording["states"]}
    assert names == set(service.orchestrator.registry.instances)
    assert recording["settings"].keys() >= {"queue", "dispatch"}


async def test_the_latest_are_kept_and_no_more(
    worker: FakeWorker, make_service: MakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MOST", 2)
    service = await make_service(worker)
    for tokens in (1, 2, 3):
        await complete(service, max_tokens=tokens)
    recorded = await recording_of(service)
    assert [one["max_tokens"] for one in recorded["requests"]] == [2, 3]
    assert not service.parts.recorder._noted
    assert recorded["is_full"]


async def test_a_pause_is_recorded(make_worker: MakeWorker, make_service: MakeService) -> None:
    stage = await scene(make_worker, make_service)
    long, _ = await stage.begin()
    stage.hurry.set()
    await stage.worker.until(lambda: len(stage.worker.resumes) == 1)
    await stage.ends("met", "met")
    (paused,) = [one for one in await requests_of(stage.service) if one["id"] == long]
    ((paused_at, resumed_at),) = paused["pauses"]
    marks = paused["marks"]
    assert marks["received"] < paused_at < resumed_at < marks["ended"]
