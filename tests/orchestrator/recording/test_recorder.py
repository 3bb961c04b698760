"""What is recorded of requests: bounded, and not a word of them."""

import msgspec
import pytest

from orchestrator.recording import recorder as recorder_module
from orchestrator.recording.facts import RecordedRequest, Recording
from orchestrator.recording.recorder import Recorder
from orchestrator.recording.wording import timeline
from protocol import Outcome
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.orchestrator.dispatch.test_pausing import URGENT, scene
from tests.support.fake_worker import FakeWorker


def recorder_of(service: Service) -> Recorder:
    explainer = service.orchestrator.stages.explainer
    assert explainer is not None
    return explainer.recorder


def requests_of(service: Service) -> list[RecordedRequest]:
    return list(recorder_of(service))


async def complete(service: Service, status: int = 200, **body: object) -> None:
    asked = {"prompt": "a secret", "max_tokens": 5} | body
    async with service.http.post("/v1/completions", json=asked) as response:
        assert response.status == status, await response.text()


async def test_what_is_recorded_holds_no_content(service: Service) -> None:
    await complete(service, user="a-secret-tenant")
    (request,) = requests_of(service)
    assert (request.outcome, request.tokens, request.prompt_tokens) == (Outcome.MET, 5, 8)
    assert request.arrived <= request.dispatched <= request.first_token <= request.ended
    assert len(request.left) == 16 and request.left == tuple(sorted(request.left))
    packed = msgspec.msgpack.encode(recorder_of(service).around(request))
    assert b"secret" not in packed and b"w0" not in packed
    recording = msgspec.msgpack.decode(packed, type=Recording)
    assert recording.request == request
    assert [one.name for one in recording.instances] == list(
        service.orchestrator.registry.instances
    )


async def test_the_latest_are_kept_and_no_more(
    worker: FakeWorker, make_service: MakeService
) -> None:
    service = await make_service(worker, telemetry__recorded_requests=2)
    for tokens in (1, 2, 3):
        await complete(service, max_tokens=tokens)
    latest = requests_of(service)[-1]
    assert [one.max_tokens for one in requests_of(service)] == [2, 3]
    recorder = recorder_of(service)
    assert not recorder._noted
    assert not recorder.around(latest).is_cut
    # Had it come before the first one ended, that would be missing.
    assert recorder.around(msgspec.structs.replace(latest, arrived=0.0)).is_cut


async def test_refusals_for_other_reasons_than_time_or_room_are_not_recorded(
    service: Service,
) -> None:
    await complete(service, 400, max_tokens=100_000)
    assert requests_of(service) == []


async def test_nothing_is_recorded_where_the_operator_wants_none(
    worker: FakeWorker, make_service: MakeService
) -> None:
    service = await make_service(worker, telemetry__recorded_requests=0)
    await complete(service)
    assert service.orchestrator.stages.explainer is None
    assert service.parts.pausing.listener is None


async def test_a_pause_is_recorded_with_whom_it_was_for(
    make_worker: MakeWorker, make_service: MakeService
) -> None:
    stage = await scene(make_worker, make_service)
    long, _ = await stage.begin()
    stage.hurry.set()
    await stage.worker.until(lambda: len(stage.worker.resumes) == 1)
    await stage.ends("met", "met")
    (paused,) = [one for one in requests_of(stage.service) if one.id == long]
    (pause,) = paused.pauses
    assert pause.instance == stage.worker.address
    assert paused.arrived < pause.at < pause.until < paused.ended
    assert pause.left_s is not None and 0 < pause.left_s <= URGENT["deadline_ms"] / 1000  # type: ignore[operator]
    events = [event.event for event in timeline(paused)]
    assert events.index("paused") < events.index("resumed") < events.index("ended")


async def test_of_too_many_those_are_kept_that_came_next_to_the_asked_one(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    await complete(service)
    recorder, one = recorder_of(service), requests_of(service)[0]
    monkeypatch.setattr(recorder_module, "MAX_REQUESTS", 4)
    recorder._ended.clear()
    for at in range(10):
        named = msgspec.structs.replace(one, id=str(at), arrived=float(at), ended=50.0)
        recorder._ended[named.id] = named
    for asked, kept in (("0", "0123"), ("5", "3456"), ("9", "6789")):
        recording = recorder.around(recorder._ended[asked])
        assert "".join(request.id for request in recording.requests) == kept
        assert recording.is_cut
