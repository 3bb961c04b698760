"""``Client.slots``: typed events, resumed streams, one rendering however often it is sent."""

from datetime import timedelta

import pytest

import tidegate
from clips.api import ClipBody
from clips.dispatch.task import OUTPUTS
from clips.plan.recipe import MAJOR, MINOR
from tests.orchestrator.conftest import MakeService
from tests.support.fake_orchestrator import FakeOrchestrator, sse
from tests.support.fake_slots import MP4, FakeClips, FakePlan, clips_of
from tests.support.fake_worker import FakeWorker
from tidegate import Client, deadline
from tidegate.slots import FILES, SCHEMA, SLOT_EVENT_TYPES
from tidegate.transport import Retries

QUEUED = sse(0, "queued", {"slot_id": "t1", "queue_position": 2, "predicted_ms": 900.0})
FACTS = {
    "seconds": 1.5,
    "frames": 36,
    "fps": 24,
    "size": 256,
    "given_up": ["check"],
    "check": {"passed": True, "score": 0.9, "models": [{"model": "a", "scores": [0.9]}]},
    "audio_ms": 30.0,
    "image_ms": 20.0,
    "video_ms": 100.0,
    "clip_ms": 5.0,
    "total_ms": 140.0,
    "deadline_met": True,
    "outcome": "partial",
    "outputs": {"mp4": "/v2/slots/t1/outputs/clip.mp4"},
}
FAILURE = {
    "code": "deadline_exceeded",
    "message": "video: out of time",
    "retryable": False,
    "outcome": "missed",
    "outputs": {"wav": "/v2/slots/t1/outputs/speech.wav"},
}


def stage(event_id: int, name: str, percent: int) -> bytes:
    return sse(event_id, "stage", {"stage": name, "percent": percent})


def result(event_id: int) -> bytes:
    return sse(event_id, "result", {"slot_id": "t1"} | FACTS)


async def test_events_are_typed() -> None:
    later = sse(3, "narration", {"of": "a later version"})
    script = [QUEUED, stage(1, "audio", 40), later, result(4)]
    async with FakeOrchestrator(script).serve() as fake, Client(fake.base_url) as client:
        events = [event async for event in client.slots.stream("Hello.")]
    assert events[:2] == [
        tidegate.SlotQueued(slot_id="t1", queue_position=2, predicted_ms=900.0),
        tidegate.SlotStage("audio", 40),
    ]
    made = events[2]
    assert isinstance(made, tidegate.SlotResult)
    assert (made.seconds, made.given_up, made.outcome) == (1.5, ("check",), "partial")
    assert made.check is not None and made.check.models[0].scores == (0.9,)
    assert fake.cancelled == []


async def test_a_recipe_is_text_or_whole_and_the_blocks_deadline_goes_along() -> None:
    whole = {"schema": "1.1", "text": "Hello.", "video": {"size": 128}}
    async with (
        FakeOrchestrator(*[[result(1)]] * 3).serve() as fake,
        Client(fake.base_url) as client,
    ):
        made = await client.slots.render("Hello.", outputs=["mp4", "wav"], on_deadline="degrade")
        await client.slots.create(whole, deadline=timedelta(seconds=20), on_disconnect="cancel")
        with deadline(50):
            await client.slots.create({"text": "Hello."}, deadline=60_000)
    assert made.slot_id == "t1"
    assert fake.submitted[:2] == [
        {
            "recipe": {"schema": "1.1", "text": "Hello."},
            "outputs": ["mp4", "wav"],
            "on_deadline": "degrade",
        },
        {"recipe": whole, "deadline_ms": 20_000, "on_disconnect": "cancel"},
    ]
    assert fake.submitted[2]["recipe"] == {"schema": "1.1", "text": "Hello."}
    assert fake.submitted[2]["deadline_ms"] <= 50_000
    assert int(fake.headers[2]["X-Timeout-Ms"]) <= 50_000


async def test_files_by_their_short_names_or_the_services_own() -> None:
    fake = FakeOrchestrator()
    fake.files = {"clip.mp4": b"an mp4", "speech.wav": b"a wav", "poster.webp": b"later"}
    async with fake.serve(), Client(fake.base_url, retries=Retries(attempts=0)) as client:
        assert await client.slots.download("t1") == b"an mp4"
        assert await client.slots.download("t1", "wav") == b"a wav"
        assert await client.slots.download("t1", "poster.webp") == b"later"
        with pytest.raises(tidegate.NotFound, match="no such file"):
            await client.slots.download("t1", "png")


def test_names_are_the_services() -> None:
    assert {name: kind.file for name, kind in OUTPUTS.items()} == FILES
    assert f"{MAJOR}.{MINOR}" == SCHEMA
    options = set(tidegate.SlotOptions.__annotations__) - {"deadline"}
    assert options | {"deadline_ms", "recipe"} == set(ClipBody.__struct_fields__)
    assert set(SLOT_EVENT_TYPES) == {"queued", "stage", "result", "error"}


async def test_with_the_real_orchestrator(worker: FakeWorker, make_service: MakeService) -> None:
    """In front of a slot model that stalls, loses its connection's client, and ends as planned."""
    plan = FakePlan(hold_at="video")
    worker.slots = FakeClips()
    worker.slots.plan = lambda call: plan
    service = await make_service(worker, slots__serve=True)
    await service.until(lambda: len(clips_of(service.orchestrator).fleet.ready()) == 1)
    async with Client(service.url) as client:
        stalled = await client.slots.create("Hello.", idempotency_key="mine")
        again = await client.slots.create("Hello.", idempotency_key="mine")
        assert again.slot_id == stalled.slot_id and stalled.predicted_ms is not None
        async with client.slots.events(stalled.slot_id) as events:
            async for event in events:
                if isinstance(event, tidegate.SlotStage) and event.stage == "video":
                    break
        assert (await client.slots.get(stalled.slot_id)).stages["audio"] == 100
        plan.release.set()
        resumed = client.slots.events(stalled.slot_id, last_event_id=events.last_event_id)
        rest = [event async for event in resumed]
        assert not any(isinstance(event, tidegate.SlotQueued) for event in rest)
        assert isinstance(rest[-1], tidegate.SlotResult) and rest[-1].frames == 24
        assert await client.slots.download(stalled.slot_id) == MP4
        status = await client.slots.get(stalled.slot_id)
        assert (status.ended, status.outcome, status.audio_ms) == (True, "met", 10.0)
        assert [line.outcome for line in (await client.slots.list(status="ended")).slots] == ["met"]

        worker.slots.does(FakePlan(hold_at="audio"))
        cancelled = await client.slots.create("Hello.")
        await client.slots.cancel(cancelled.slot_id)
        (*_, last) = [event async for event in client.slots.events(cancelled.slot_id)]
        assert isinstance(last, tidegate.SlotFailed) and last.code == "cancelled"

        worker.slots.plan = lambda call: FakePlan(
            error_at="video", error="deadline_exceeded: video: out of time", saved=True
        )
        with pytest.raises(tidegate.DeadlineExceeded) as raised:
            await client.slots.render("Hello.", outputs=["wav"])
        assert set(raised.value.details["outputs"]) == {"wav"}
        with pytest.raises(tidegate.InvalidRequest, match="schema"):
            await client.slots.create({"schema": "9.0", "text": "Hello."})
        (instance,) = await client.instances()
        assert instance.slot is not None and instance.slot.slots_total == 2
