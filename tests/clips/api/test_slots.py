"""``/v2/slots``: submit, follow, resume, cancel, fetch."""

import asyncio
import logging
from typing import Any

import pytest

from tests.orchestrator.conftest import MakeService, MakeWorker, Service, bearer
from tests.support.cases import for_each
from tests.support.fake_slots import MP4, PNG, WAV, FakeClips, FakePlan, clips_of
from tests.support.fake_worker import FakeWorker
from tests.support.sse import read_events

RECIPE: dict[str, Any] = {"schema": "1.0", "text": "Good morning.", "video": {"fps": 12}}


@pytest.fixture
async def fake(worker: FakeWorker) -> FakeClips:
    worker.slots = FakeClips()
    return worker.slots


@pytest.fixture
async def service(fake: FakeClips, worker: FakeWorker, make_service: MakeService) -> Service:
    return await serving(await make_service(worker))


async def serving(service: Service, count: int = 1) -> Service:
    """Once so many of its instances take clips."""
    await service.until(lambda: len(clips_of(service.orchestrator).fleet.ready()) == count)
    return service


async def submit(
    service: Service, status: int = 202, headers: dict[str, str] | None = None, **changes: Any
) -> dict[str, Any]:
    body = {"recipe": RECIPE, "deadline_ms": 20_000} | changes
    answer = await service.ask("POST", "/v2/slots", status, json=body, headers=headers)
    told: dict[str, Any] = answer if status == 202 else answer["error"]
    return told


async def status_of(service: Service, clip: dict[str, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = await service.ask("GET", f"/v2/slots/{clip['slot_id']}")
    return answer


async def until_ended(service: Service, clip: dict[str, Any]) -> dict[str, Any]:
    found = clips_of(service.orchestrator).store.get(clip["slot_id"])
    await service.until(lambda: found.ending is not None)
    return await status_of(service, clip)


async def test_a_recipe_becomes_a_clip(service: Service, fake: FakeClips) -> None:
    clip = await submit(service, outputs=["mp4", "wav", "png"])
    assert clip["status"] == "dispatched" and clip["queue_position"] == 0
    assert clip["predicted_ms"] > 0 and clip["outputs"] == {} and clip["correlation_id"]
    events = await service.follow(clip["events_url"])
    assert [event.id for event in events] == [str(number) for number in range(len(events))]
    assert events[0].event == "queued"
    stages = [event.json() for event in events if event.event == "stage"]
    names = ("audio", "image", "video", "clip")
    told = [(stage["stage"], stage["percent"]) for stage in stages]
    assert told == [(name, percent) for name in names for percent in (0, 50, 100)]
    result = events[-1].json()
    assert events[-1].event == "result" and result["outcome"] == "met"
    assert result["video_ms"] == 10.0 and result["deadline_met"] is True
    status = await status_of(service, clip)
    assert status["status"] == "ended" and status["outputs"] == result["outputs"]
    for name, kind, data in (
        ("mp4", "video/mp4", MP4),
        ("wav", "audio/wav", WAV),
        ("png", "image/png", PNG),
    ):
        async with service.http.get(status["outputs"][name]) as response:
            assert (response.content_type, await response.read()) == (kind, data)
    (call,) = fake.calls
    assert call.recipe == RECIPE and call.parameters["outputs"] == "mp4,wav,png"
    assert 0 < call.parameters["deadline_ms"] <= 20_000
    assert call.request_id == f"{clip['slot_id']}/{clip['correlation_id']}"
    assert service.metric("tidegate_slot_outcomes_total", outcome="met", code="") == 1
    assert service.metric("tidegate_slot_stage_quantile_ms", stage="clip", quantile="0.95") == 10


async def test_resume_without_duplicates(service: Service, fake: FakeClips) -> None:
    plan = fake.does(FakePlan(hold_at="video"))
    clip = await submit(service)
    async with service.http.get(clip["events_url"]) as response:
        first = []
        async for event in read_events(response):
            first.append(event)
            if event.event == "stage" and event.json()["stage"] == "video":
                break
    plan.release.set()
    rest = await service.follow(clip["events_url"], after=first[-1].id)
    ids = [int(event.id) for event in (*first, *rest)]
    assert ids == list(range(len(ids))) and rest[-1].event == "result"
    again = await service.follow(clip["events_url"])
    assert [event.id for event in again] == [str(number) for number in ids]
    await service.ask("GET", clip["events_url"], 204, headers={"Last-Event-ID": rest[-1].id})


async def test_wp2_cancel_is_idempotent_and_reaches_the_worker(
    service: Service, fake: FakeClips
) -> None:
    fake.does(FakePlan(hold_at="image"))
    clip = await submit(service)
    await service.until(lambda: fake.running == 1)
    url = f"/v2/slots/{clip['slot_id']}"
    for call, path in (("POST", f"{url}/cancel"), ("DELETE", url), ("POST", f"{url}/cancel")):
        await service.ask(call, path, 202)
    status = await status_of(service, clip)
    assert (status["outcome"], status["error"]["code"]) == ("aborted", "cancelled")
    await service.until(lambda: fake.cancelled == 1 and fake.running == 0)
    events = await service.follow(clip["events_url"])
    assert (events[-1].event, events[-1].json()["code"]) == ("error", "cancelled")


@for_each("on_disconnect", ["cancel", "continue"])
async def test_wp1_a_client_that_goes_away(
    service: Service, fake: FakeClips, on_disconnect: str
) -> None:
    plan = fake.does(FakePlan(hold_at="audio"))
    clip = await submit(service, on_disconnect=on_disconnect)
    async with service.http.get(clip["events_url"]) as response:
        await anext(read_events(response))
        response.close()
    if on_disconnect == "cancel":
        status = await until_ended(service, clip)
        assert (status["outcome"], status["error"]["code"]) == ("aborted", "client_disconnected")
    else:
        found = clips_of(service.orchestrator).store.get(clip["slot_id"])
        await service.until(lambda: not found.listeners)
        plan.release.set()
        assert (await until_ended(service, clip))["outcome"] == "met"


@for_each(
    ("changes", "status", "field", "words"),
    [
        ({"recipe": {"schema": "1.0"}}, 400, "recipe.text", "is missing"),
        ({"recipe": "hello"}, 400, "recipe", "must be a JSON object"),
        ({"outputs": ["gif"]}, 400, "outputs[0]", "expected one of: mp4, png, wav"),
        ({"outputs": []}, 400, "outputs", "at least one"),
        ({"model": "llm"}, 404, "model", "available: slot"),
        ({"on_deadline": "fit"}, 400, "on_deadline", "error"),
        ({"colour": 1}, 400, "colour", "not a known field"),
    ],
)
async def test_bad_input_is_told_what_is_wrong(
    service: Service, changes: dict[str, Any], status: int, field: str, words: str
) -> None:
    error = await submit(service, status, **changes)
    assert error["field"] == field and words in error["message"]


@for_each(
    ("error", "at", "outcome", "code"),
    [
        ("invalid_request: recipe.voice.name: no such voice", "", "refused", "invalid_request"),
        ("deadline_exceeded: plan: 0.1 s are left", "", "refused", "deadline_exceeded"),
        ("deadline_exceeded: video: the deadline came", "video", "missed", "deadline_exceeded"),
        ("engine_error: image: RuntimeError", "image", "failed", "engine_error"),
        ("internal: the slot pipeline failed", "clip", "failed", "engine_error"),
    ],
)
async def test_a_workers_error_reaches_the_client(
    service: Service, fake: FakeClips, error: str, at: str, outcome: str, code: str
) -> None:
    fake.does(FakePlan(error=error, error_at=at, saved=at == "video"))
    clip = await submit(service)
    status = await until_ended(service, clip)
    assert (status["outcome"], status["error"]["code"]) == (outcome, code)
    assert bool(status["outputs"]) == (at == "video"), "what there is of it is kept"
    last = (await service.follow(clip["events_url"]))[-1]
    assert (last.event, last.json()["code"]) == ("error", code)


async def test_a_deadline_ends_it_here_where_the_worker_does_not(
    service: Service, fake: FakeClips
) -> None:
    fake.does(FakePlan(hold_at="video"))
    clip = await submit(service)
    found = clips_of(service.orchestrator).store.get(clip["slot_id"])
    await service.until(lambda: "video" in found.percents)
    service.leap(21)
    status = await until_ended(service, clip)
    assert (status["outcome"], status["error"]["code"]) == ("missed", "deadline_exceeded")
    assert "in video" in status["error"]["message"]
    await service.until(lambda: fake.cancelled == 1)


async def test_anothers_clip_is_not_there(make_service: MakeService, worker: FakeWorker) -> None:
    worker.slots = FakeClips()
    keys = {"a": {"token": "token-a"}, "b": {"token": "token-b"}}
    service = await serving(await make_service(worker, keys=keys, admin_token="root"))

    clip = await submit(service, headers=bearer("token-a"))
    found = clips_of(service.orchestrator).store.get(clip["slot_id"])
    await service.until(lambda: found.ending is not None)
    url = f"/v2/slots/{clip['slot_id']}"
    for path in (url, f"{url}/events", f"{url}/outputs/clip.mp4"):
        for token, status in (("token-b", 404), ("token-a", 200), ("root", 200)):
            await service.ask("GET", path, status, headers=bearer(token))
    await service.ask("DELETE", url, 404, headers=bearer("token-b"))
    for token, count in (("token-b", 0), ("token-a", 1), ("root", 1)):
        assert len((await service.ask("GET", "/v2/slots", headers=bearer(token)))["slots"]) == count


@for_each("named_by", ("task_id", "correlation_id"))
async def test_or21_a_clip_is_in_the_register_of_all_that_lives(
    service: Service, fake: FakeClips, named_by: str
) -> None:
    fake.does(FakePlan(hold_at="video"))
    clip = await submit(service, on_disconnect="continue")
    (line,) = (await service.ask("GET", "/v2/tasks"))["tasks"]
    assert (line["task_id"], line["api"]) == (clip["slot_id"], "slots")
    stopped = await service.ask("DELETE", f"/v2/tasks/{line[named_by]}", 202)
    assert stopped["task_ids"] == [clip["slot_id"]]
    assert (await status_of(service, clip))["outcome"] == "aborted"


async def test_files_have_ranges_and_heads(service: Service) -> None:
    clip = await submit(service)
    url = (await until_ended(service, clip))["outputs"]["mp4"]
    size = len(MP4)

    async def get(**headers: str) -> tuple[int, str | None, bytes]:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        async with service.http.get(url, headers=named) as response:
            return response.status, response.headers.get("Content-Range"), await response.read()

    assert await get() == (200, None, MP4)
    assert await get(Range="bytes=4-7") == (206, f"bytes 4-7/{size}", b"ftyp")
    last = f"bytes {size - 5}-{size - 1}/{size}"
    assert await get(Range=f"bytes={size - 5}-") == (206, last, MP4[-5:])
    assert await get(Range="bytes=-5") == (206, last, MP4[-5:])
    for beyond in (size, 2**70):
        assert (await get(Range=f"bytes={beyond}-"))[:2] == (416, f"bytes */{size}")
        assert await get(Range=f"bytes={size - 5}-{beyond}") == (206, last, MP4[-5:])
        assert await get(Range=f"bytes=-{beyond}") == (200, None, MP4)
    for odd in ("bytes=5-2", "bytes=1-2,4-5", "lines=1-2", "bytes=-"):
        assert await get(Range=odd) == (200, None, MP4)
    async with service.http.head(url) as response:
        etag = response.headers["ETag"]
        assert (response.status, response.content_length) == (200, size)
        assert response.headers["X-Content-Type-Options"] == "nosniff"
    assert (await get(If_None_Match=etag))[0] == 304
    assert (await get(Range="bytes=4-7", If_Range=etag))[0] == 206
    assert (await get(Range="bytes=4-7", If_Range='"other"'))[0] == 200
    async with service.http.get(url.replace("clip", "clip%0d%0aX: y")) as response:
        assert response.status == 404 and "X" not in response.headers


async def test_no_text_in_the_log(
    service: Service, fake: FakeClips, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    recipe = {**RECIPE, "text": "a-secret-word", "portrait": {"prompt": "another-secret"}}
    clip = await submit(service, recipe=recipe, headers={"X-Correlation-Id": "named"})
    await until_ended(service, clip)
    (line,) = [r for r in caplog.records if getattr(r, "fields", {}).get("api") == "slots"]
    told = line.fields  # type: ignore[attr-defined]
    assert (told["correlation_id"], told["outcome"]) == ("named", "met")
    assert "secret" not in repr([(r.getMessage(), r.__dict__) for r in caplog.records])


async def test_instances_show_their_slot_models(
    make_service: MakeService, make_worker: MakeWorker
) -> None:
    both, text, clips = [await make_worker() for _ in range(3)]
    both.slots, clips.slots, clips.is_slots_only = FakeClips(), FakeClips(slots_total=5), True
    service = await serving(await make_service(both, text, clips), 2)
    await service.until(lambda: sum(i.ready for i in service.orchestrator.registry) == 2)
    found = {
        one["address"]: one for one in (await service.ask("GET", "/v2/instances"))["instances"]
    }
    assert found[text.address]["slot"] is None and found[text.address]["ready"]
    assert found[both.address]["slot"]["told"]["stages"]["video"]["seconds_per_unit"] == 0.01
    assert found[clips.address]["slot"]["slots_total"] == 5 and not found[clips.address]["ready"]
    assert service.metric("tidegate_slot_abort_to_freed_ms", instance=both.address, quantile="0.5")


async def test_a_drain_leaves_time_to_fetch_the_clip(service: Service, fake: FakeClips) -> None:
    plan = fake.does(FakePlan(hold_at="video"))
    clip = await submit(service)
    await service.until(lambda: fake.running == 1)
    draining = asyncio.create_task(service.parts.lifecycle.drain(30.0))
    await service.until(lambda: service.parts.health.status == "draining")
    plan.release.set()
    status = await until_ended(service, clip)
    async with service.http.get(status["outputs"]["mp4"]) as response:
        assert await response.read() == MP4
    assert not draining.done()
    await draining


async def test_limits_of_a_key_count_clips_too(
    make_service: MakeService, worker: FakeWorker
) -> None:
    worker.slots = FakeClips()
    plan = worker.slots.does(FakePlan(hold_at="video"))
    service = await serving(await make_service(worker, limits__each_key__concurrent=1))
    clip = await submit(service)
    assert (await submit(service, 429))["code"] == "rate_limited"
    plan.release.set()
    await until_ended(service, clip)
    await until_ended(service, await submit(service))


async def test_the_service_says_that_it_serves_clips(
    service: Service, make_service: MakeService, make_worker: MakeWorker
) -> None:
    without = await make_service(await make_worker())
    for one, serves in ((service, True), (without, False)):
        assert (await one.ask("GET", "/v2/capabilities"))["slots"] is serves
