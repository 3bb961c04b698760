"""What is recorded of requests: bounded, and not a word of them."""

import msgspec
import pytest

from orchestrator import recorder
from perf.sim.replay.again import Recorded, RecordedRequest
from protocol import Outcome
from tests.orchestrator.conftest import OPERATOR, MakeService, MakeWorker, Service
from tests.orchestrator.dispatch.test_pausing import scene
from tests.support.fake_worker import FakeWorker


async def recording_of(service: Service) -> Recorded:
    async with service.http.get("/admin/recording", headers=OPERATOR) as response:
        assert response.status == 200, await response.text()
        return Recorded.read(await response.read())


async def requests_of(service: Service) -> list[RecordedRequest]:
    return (await recording_of(service)).requests


async def complete(service: Service, status: int = 200, **body: object) -> None:
    asked = {"prompt": "a secret", "max_tokens": 5} | body
    await service.ask("POST", "/v1/completions", status, json=asked)


async def test_what_is_recorded_holds_no_content(service: Service) -> None:
    await complete(service, user="a-secret-tenant")
    (request,) = await requests_of(service)
    assert (request.outcome, request.tokens, request.prompt_tokens) == (Outcome.MET, 5, 8)
    marks = request.marks
    assert request.arrived <= marks.dispatched <= marks.first_token <= request.ended
    assert len(request.left) == 16 and request.left == tuple(sorted(request.left))
    async with service.http.get("/admin/recording", headers=OPERATOR) as response:
        text = await response.read()
    assert b"secret" not in text and b"w0" not in text
    recording = (await recording_of(service)).around(request)
    assert recording.request == request and recording.requests == [request]
    assert [one.name for one in recording.instances] == list(
        service.orchestrator.registry.instances
    )
    assert msgspec.json.decode(text)["settings"].keys() >= {"queue", "dispatch"}


async def test_the_latest_are_kept_and_no_more(
    worker: FakeWorker, make_service: MakeService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "MOST", 2)
    service = await make_service(worker)
    for tokens in (1, 2, 3):
        await complete(service, max_tokens=tokens)
    recorded = await recording_of(service)
    latest = recorded.requests[-1]
    assert [one.max_tokens for one in recorded.requests] == [2, 3]
    assert not service.parts.recorder._noted
    assert recorded.is_full and not recorded.around(latest).is_cut


async def test_a_pause_is_recorded(make_worker: MakeWorker, make_service: MakeService) -> None:
    stage = await scene(make_worker, make_service)
    long, _ = await stage.begin()
    stage.hurry.set()
    await stage.worker.until(lambda: len(stage.worker.resumes) == 1)
    await stage.ends("met", "met")
    (paused,) = [one for one in await requests_of(stage.service) if one.id == long]
    (pause,) = paused.pauses
    assert paused.arrived < pause.at < pause.until < paused.ended
