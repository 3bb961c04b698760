"""Which clips are let in: never fewer than could be met while instances idle (DL-7, DL-15), and a
sample of the others (DL-17)."""

import asyncio
import re
from typing import Any

from clips.plan.budgets import ClipStage
from clips.state import StageState
from tests.clips.api.test_slots import serving, submit, until_ended
from tests.clips.dispatch.test_service import fake_of
from tests.orchestrator.conftest import MakeService, MakeWorker, Service
from tests.support.fake_slots import FakeClips, FakePlan, clips_of, make_state
from tests.support.fake_worker import FakeWorker

A_BUSY_START = {"seconds_per_unit": 100.0, "least": 0.0}
"""Nothing was rendered yet: by what warmed it up, a clip takes minutes."""
SEEN = {"seconds_per_unit": 20.0, "least": 10.0}


def stages(*, seconds_per_unit: float, least: float) -> dict[str, StageState]:
    """A check takes so long, and everything else next to nothing."""
    known = {stage.value: StageState("fake", 0.001, least=0.0008) for stage in ClipStage}
    return known | {"clip": StageState("fake", seconds_per_unit, least=least)}


async def serve(
    make_service: MakeService,
    make_worker: MakeWorker,
    paces: dict[str, float],
    slots: int = 2,
    **settings: Any,
) -> tuple[Service, FakeClips]:
    worker: FakeWorker = await make_worker()
    worker.slots = FakeClips(stages=stages(**paces), slots_total=slots, slots_free=slots)
    return await serving(await make_service(worker, **settings)), fake_of(worker)


async def test_dl19_clips_are_served_after_a_busy_start(
    make_service: MakeService, make_worker: MakeWorker
) -> None:
    """Deadlines of 5 to 45 s ended in 504 on an idle service."""
    service, model = await serve(make_service, make_worker, A_BUSY_START, REFUSAL_SAMPLE=0.0)
    model.plan = lambda call: held
    held = FakePlan(hold_at="video")
    clips = [await submit(service, deadline_ms=ms) for ms in (5_000, 20_000, 45_000, 45_000)]
    assert [clip["status"] for clip in clips] == ["dispatched"] * 2 + ["queued"] * 2
    held.release.set()
    ends = [await until_ended(service, clip) for clip in clips]
    assert [end["outcome"] for end in ends] == ["met"] * 4
    assert service.metric("tidegate_slot_infeasible_judged_total") == 0
    assert not any("keep_on" in call.parameters for call in model.calls)


async def test_dl7_what_is_certain_to_be_late_is_refused(
    make_service: MakeService, make_worker: MakeWorker
) -> None:
    service, _ = await serve(make_service, make_worker, SEEN, REFUSAL_SAMPLE=0.0)
    error = await submit(service, 504, deadline_ms=9_000)
    assert (error["code"], error["binding_constraint"]) == ("deadline_infeasible", "clip")
    advice = re.search(r"retry with a deadline (\d+) ms from now", error["message"])
    assert advice and int(advice[1]) >= error["predicted_finish_ms"]
    # It hardly takes less than 20 s, but it may, and nobody else wants the time.
    clip = await submit(service, deadline_ms=15_000)
    assert (await until_ended(service, clip))["outcome"] == "met"
    assert service.metric("tidegate_slot_infeasible_refused_total") == 1
    assert service.metric("tidegate_slot_unserved_total", kind="admission") == 1


async def test_what_will_hardly_be_in_time_waits_for_nobody_who_would_be(
    make_service: MakeService, make_worker: MakeWorker
) -> None:
    service, model = await serve(make_service, make_worker, SEEN, 1, REFUSAL_SAMPLE=0.0)
    held = model.does(FakePlan(hold_at="video"))
    running = await submit(service, deadline_ms=60_000)
    error = await submit(service, 504, deadline_ms=15_000)
    assert error["code"] == "deadline_infeasible", "though it may take 10 s: no capacity idles"
    later = await submit(service, deadline_ms=60_000)
    held.release.set()
    for clip in (running, later):
        assert (await until_ended(service, clip))["outcome"] == "met"


async def test_it_waits_for_a_fast_instance_rather_than_try_a_slow_one(
    make_service: MakeService, make_worker: MakeWorker
) -> None:
    slow, fast = await make_worker(), await make_worker()
    slow.slots = FakeClips(stages=stages(seconds_per_unit=60.0, least=10.0))
    fast.slots = FakeClips(stages=stages(**SEEN), slots_total=1, slots_free=1)
    held = fast.slots.does(FakePlan(hold_at="video"))
    service = await serving(await make_service(slow, fast, REFUSAL_SAMPLE=0.0), 2)
    clips = [await submit(service, deadline_ms=ms) for ms in (39_000, 39_500)]
    clips.append(await submit(service, deadline_ms=50_000))
    held.release.set()
    ends = [await until_ended(service, clip) for clip in clips]
    assert [end["instance"] for end in ends] == [fast.address, slow.address, fast.address]


async def test_dl7_observe_lets_in_and_counts(
    make_service: MakeService, make_worker: MakeWorker
) -> None:
    service, model = await serve(make_service, make_worker, SEEN, admission__mode="observe")
    clip = await submit(service, deadline_ms=9_000)
    assert (await until_ended(service, clip))["outcome"] == "met"
    assert service.metric("tidegate_slot_infeasible_judged_total") == 1
    assert service.metric("tidegate_slot_infeasible_refused_total") == 0
    assert [call.parameters["keep_on"] for call in model.calls] == [True]


async def test_dl17_a_sample_of_refusals_is_let_in_and_its_rate_published(
    make_service: MakeService, make_worker: MakeWorker
) -> None:
    service, model = await serve(make_service, make_worker, SEEN, 1, REFUSAL_SAMPLE=1.0)
    held = model.does(FakePlan(hold_at="video"))
    clips = [await submit(service, deadline_ms=ms) for ms in (60_000, 9_000)]
    # Those that are refused otherwise make nobody late.
    clips.append(await submit(service, deadline_ms=60_000))
    assert [clip["queue_position"] for clip in clips] == [0, 1, 1]
    held.release.set()
    for clip in clips:
        assert (await until_ended(service, clip))["outcome"] == "met"
    sampled = {"kind": "admission", "result": "met"}
    assert service.metric("tidegate_slot_infeasible_samples_total", **sampled) == 1
    assert service.metric("tidegate_slot_false_refusal_rate") == 1


async def test_dl17_a_sample_of_a_full_queue_and_of_early_stops(
    make_service: MakeService, make_worker: MakeWorker
) -> None:
    settings = {"REFUSAL_SAMPLE": 1.0, "MOST_WAITING": 0}
    service, model = await serve(make_service, make_worker, SEEN, 1, **settings)
    held = model.does(FakePlan(hold_at="video", spared=True))
    clips = [await submit(service, deadline_ms=60_000) for _ in range(2)]
    assert clips[1]["status"] == "queued"
    held.release.set()
    for clip in clips:
        assert (await until_ended(service, clip))["outcome"] == "met"
    for kind in ("stopped", "queue_full"):
        labels = {"kind": kind, "result": "met"}
        assert service.metric("tidegate_slot_infeasible_samples_total", **labels) == 1


async def test_dl7_what_waits_ends_once_it_is_certain_to_be_late(
    make_service: MakeService, make_worker: MakeWorker
) -> None:
    service, model = await serve(make_service, make_worker, A_BUSY_START, 1, REFUSAL_SAMPLE=0.0)
    held = model.does(FakePlan(hold_at="video"))
    running = await submit(service, deadline_ms=60_000)
    waits = await submit(service, deadline_ms=30_000)
    found = clips_of(service.orchestrator).store.get(waits["slot_id"])
    await asyncio.sleep(0)
    assert found.ending is None
    # Now it is known.
    model.state = make_state(stages=stages(**SEEN | {"least": 40.0}), slots_total=1, slots_free=1)
    end = await until_ended(service, waits)
    assert (end["outcome"], end["error"]["code"]) == ("refused", "deadline_infeasible")
    assert service.metric("tidegate_slot_unserved_total", kind="queue") == 1
    held.release.set()
    assert (await until_ended(service, running))["outcome"] == "met"
