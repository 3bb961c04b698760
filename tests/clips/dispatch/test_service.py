"""Clips on several instances: placement, waiting, retries, silences."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from clips.dispatch.fleet import ClipHealth
from clips.state import StageState
from tests.clips.api.test_slots import RECIPE, serving, status_of, submit, until_ended
from tests.orchestrator.conftest import OPERATOR, MakeService, MakeWorker, Service, bearer
from tests.support.fake_slots import FakeClips, FakePlan, clips_of, make_state
from tests.support.fake_worker import FakeWorker


async def a_worker(make_worker: MakeWorker, *, port: int = 0, **state: Any) -> FakeWorker:
    worker = await make_worker(port=port)
    worker.slots = FakeClips(**state)
    return worker


def fake_of(worker: FakeWorker) -> FakeClips:
    assert worker.slots is not None
    return worker.slots


def slow(seconds: float) -> dict[str, StageState]:
    """A whole check takes so long, the rest next to nothing."""
    return make_state().stages | {"clip": StageState("fake", seconds)}


MakePair = Callable[..., Awaitable[tuple[Service, FakeWorker, FakeWorker]]]


@pytest.fixture
def make_pair(make_service: MakeService, make_worker: MakeWorker) -> MakePair:
    """A service over an instance that does as planned, and a slower one."""

    async def make(
        plan: FakePlan, slow_s: float = 5.0, **settings: object
    ) -> tuple[Service, FakeWorker, FakeWorker]:
        near, far = await a_worker(make_worker), await a_worker(make_worker, stages=slow(slow_s))
        fake_of(near).does(plan)
        return await serving(await make_service(near, far, **settings), 2), near, far

    return make


async def test_the_least_slack_goes_first_and_no_buffer_idles(
    make_service: MakeService, make_worker: MakeWorker
) -> None:
    worker = await a_worker(make_worker, slots_total=1, slots_free=1)
    plans: list[FakePlan] = []

    def plan(call: object) -> FakePlan:
        plans.append(FakePlan(hold_at="video"))
        return plans[-1]

    fake_of(worker).plan = plan
    service = await serving(await make_service(worker))
    running = await submit(service, deadline_ms=60_000)
    late = await submit(service, deadline_ms=50_000)
    soon = await submit(service, deadline_ms=20_000)
    found = [(await status_of(service, clip)) for clip in (running, soon, late)]
    assert [one["queue_position"] for one in found] == [0, 1, 2]
    assert found[1]["status"] == "queued" and found[1]["predicted_ms"] is not None
    assert service.metric("tidegate_slots_waiting") == 2
    for number, clip in enumerate((running, soon, late)):
        await service.until(lambda number=number: len(plans) == number + 1)  # type: ignore[misc]
        plans[number].release.set()
        await until_ended(service, clip)
    ids = [call.request_id.partition("/")[0] for call in fake_of(worker).calls]
    assert ids == [clip["slot_id"] for clip in (running, soon, late)]


async def test_or24_a_key_leaves_places_to_wait_to_others(
    make_service: MakeService, make_worker: MakeWorker
) -> None:
    worker = await a_worker(make_worker, slots_total=1, slots_free=1)
    plan = fake_of(worker).does(FakePlan(hold_at="video"))
    keys = {"loud": {"token": "loud-token"}, "calm": {"token": "calm-token"}}
    service = await serving(await make_service(worker, MOST_WAITING=4, keys=keys))
    for _ in range(4):  # one is rendered
        await submit(service, headers=bearer("loud-token"))
    error = await submit(service, 429, headers=bearer("loud-token"))
    assert "3 of this key" in error["message"]
    await submit(service, headers=bearer("calm-token"))
    plan.release.set()


async def test_who_was_let_in_is_not_pushed_beyond_its_deadline(
    make_service: MakeService, make_worker: MakeWorker
) -> None:
    """One buffer, 10 s each: a second has 25 s, and a third with less slack is not let in."""
    worker = await a_worker(make_worker, slots_total=1, slots_free=1, stages=slow(10.0))
    fake_of(worker).does(FakePlan(hold_at="audio"))
    service = await serving(await make_service(worker))
    first = await submit(service, deadline_ms=60_000)
    second = await submit(service, deadline_ms=25_000)
    error = await submit(service, 504, deadline_ms=21_000)
    assert (error["code"], error["binding_constraint"]) == ("deadline_infeasible", "queue")
    assert "accepted before" in error["message"]
    hopeless = await submit(service, 504, deadline_ms=9_000)
    assert hopeless["binding_constraint"] == "clip"
    for clip in (first, second):
        await service.ask("DELETE", f"/v2/slots/{clip['slot_id']}", 202)


async def test_what_a_dying_instance_had_is_rendered_elsewhere(make_pair: MakePair) -> None:
    service, near, far = await make_pair(FakePlan(die_at="video"))
    clip = await submit(service, recipe=RECIPE | {"portrait": {"seed": 7}})
    status = await until_ended(service, clip)
    assert (status["outcome"], status["instance"]) == ("met", far.address)
    assert fake_of(far).calls[0].recipe == fake_of(near).calls[0].recipe
    assert service.metric("tidegate_slot_retries_total") == 1
    events = await service.follow(clip["events_url"])
    assert [int(event.id) for event in events] == list(range(len(events)))
    assert [event.event for event in events].count("result") == 1


async def test_a_clip_is_not_sent_for_ever(
    make_service: MakeService, make_worker: MakeWorker
) -> None:
    worker = await a_worker(make_worker)
    fake_of(worker).does(FakePlan(error="no_capacity: 64 slots wait already"))
    service = await serving(await make_service(worker, ATTEMPTS=3))
    status = await until_ended(service, await submit(service))
    assert (status["outcome"], status["error"]["code"]) == ("failed", "no_capacity")
    assert len(fake_of(worker).calls) == 3


async def test_no_time_for_another_try(make_pair: MakePair) -> None:
    service, near, far = await make_pair(FakePlan(die_at="video"), slow_s=50.0)
    clip = await submit(service, deadline_ms=700)
    await service.until(lambda: bool(fake_of(near).calls))
    await near.stop()
    status = await until_ended(service, clip)
    assert status["error"]["code"] in ("instance_lost", "deadline_exceeded")
    assert not fake_of(far).calls, "it could not have been in time there"


async def test_a_silent_instance_is_suspect_then_down(
    make_pair: MakePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = FakePlan(hold_at="video")
    service, near, far = await make_pair(held, SUSPECT_AFTER_S=0.3, DOWN_AFTER_S=0.6)
    instance = clips_of(service.orchestrator).fleet.instances[near.address]
    clip = await submit(service)
    await service.until(lambda: fake_of(near).running == 1)
    fake_of(near).is_silent = True
    await service.until(lambda: instance.health is ClipHealth.SUSPECT)
    assert (await submit(service))["status"] == "dispatched"
    await service.until(lambda: len(fake_of(far).calls) == 1)
    await service.until(lambda: fake_of(near).cancelled == 1)
    status = await until_ended(service, clip)
    assert (status["outcome"], status["instance"]) == ("met", far.address)
    # It is connected to again, and may take its time to answer that.
    broken: list[str] = []
    watching = clips_of(service.orchestrator).fleet._links[near.address].sessions
    monkeypatch.setattr(watching, "break_off", broken.append)
    for _ in range(3):
        clips_of(service.orchestrator).fleet.check_heartbeats()
    assert instance.health is ClipHealth.DOWN and not broken
    fake_of(near).is_silent = False
    await service.until(lambda: instance.health is ClipHealth.UP)


async def test_an_instance_taken_out_of_use_gets_no_clips(
    make_service: MakeService, make_worker: MakeWorker
) -> None:
    worker = await a_worker(make_worker)
    service = await serving(await make_service(worker))
    for verb, status in (("drain", 503), ("undrain", 202)):
        url = f"/v2/instances/{worker.address}/{verb}"
        await service.ask("POST", url, 202, headers=OPERATOR)
        clip = await submit(service, status)
    await until_ended(service, clip)


async def test_somebody_elses_clips_take_room_too(
    make_service: MakeService, make_worker: MakeWorker
) -> None:
    worker = await a_worker(make_worker, slots_total=2, slots_free=0, free_in_s=(3.0, 4.0))
    service = await serving(await make_service(worker))
    clip = await submit(service)
    assert clip["status"] == "queued" and 2500 < clip["predicted_ms"] < 4500
    fake_of(worker).state = make_state()
    assert (await until_ended(service, clip))["outcome"] == "met"


async def test_a_model_that_was_unloaded_gets_no_more_clips(make_pair: MakePair) -> None:
    """Its watch may go on; what is sent is refused by Triton."""
    unknown = "Request for unknown model: 'slot' has no available versions"
    service, near, far = await make_pair(FakePlan(error=unknown))
    clip = await submit(service)
    watches = fake_of(near).watches
    status = await until_ended(service, clip)
    assert (status["outcome"], status["instance"]) == ("met", far.address)
    await service.until(lambda: fake_of(near).watches > watches)


async def test_a_drain_ends_at_once_what_it_could_not_wait_for(
    make_service: MakeService, make_worker: MakeWorker
) -> None:
    worker = await a_worker(make_worker, slots_total=1, slots_free=1, stages=slow(10.0))
    plan = fake_of(worker).does(FakePlan(hold_at="clip"))
    service = await serving(await make_service(worker))
    running, waiting = await submit(service), await submit(service, deadline_ms=60_000)
    (instance,) = (await service.ask("GET", "/v2/instances"))["instances"]
    assert instance["jobs"] == 1
    draining = asyncio.create_task(service.parts.lifecycle.drain(12.0))
    status = await until_ended(service, waiting)
    assert (status["outcome"], status["error"]["code"]) == ("failed", "draining")
    assert (await status_of(service, running))["status"] != "ended"
    plan.release.set()
    await draining
    assert (await status_of(service, running))["outcome"] == "met"
