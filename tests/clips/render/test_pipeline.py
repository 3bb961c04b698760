"""The order of stages, and every way in which a clip can end: buffers come back whole each time."""

import asyncio
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from clips.plan.budgets import ClipStage, StageBudget, StageTimes
from clips.plan.plan import ClipPlan
from clips.plan.recipe import RecipeError
from clips.render.buffers import BufferPool
from clips.render.build import warm_up
from clips.render.clip import ClipOrder
from clips.render.errors import OutOfTime, StageTimeout
from clips.render.stages.base import Step
from tests.clips.render.fakes import CPU, RECIPE, SIZES, Rig, raising, stepping_on
from worker.errors import MemoryLimitExceeded


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.pipeline.close()
    assert all(fake.closed for fake in rig.fakes.values())


async def test_a_clip_is_rendered_in_order(rig: Rig) -> None:
    clip = await rig.run()
    assert set(rig.order[:2]) == {"audio", "image"} and rig.order[2:] == ["video", "clip"]
    assert clip.check is not None and clip.check.passed
    assert clip.plan.given_up == () and set(clip.stage_ms) == set(ClipStage)
    assert {stage for stage, _ in rig.said} == set(ClipStage)
    await rig.is_sound()


async def test_speech_and_portrait_run_at_the_same_time(rig: Rig) -> None:
    both = threading.Barrier(2, timeout=60)
    for stage in (ClipStage.SPEECH, ClipStage.PORTRAIT):
        rig.fakes[stage].hook = lambda step: both.wait() and None
    await rig.run()


async def test_a_failed_sibling_is_stopped_and_waited_for(rig: Rig) -> None:
    stepping, stopped = threading.Event(), threading.Event()

    def step_on(step: Step) -> None:
        stepping.set()
        try:
            while True:
                step(0.1)
        finally:
            stopped.set()

    def fail(step: Step) -> None:
        stepping.wait(60)
        raise RuntimeError("gone")

    rig.fakes[ClipStage.SPEECH].hook = step_on
    rig.fakes[ClipStage.PORTRAIT].hook = fail
    unfinished = await rig.fails()
    assert stopped.is_set() and "image" in str(unfinished)
    await rig.is_sound()


async def test_speech_is_tried_again_once(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clips.plan.budgets.BACKOFF_S", 0.0)

    def fail_first(step: Step) -> None:
        if rig.fakes[ClipStage.SPEECH].runs == 1:
            raise OSError("a hiccup")

    rig.fakes[ClipStage.SPEECH].hook = fail_first
    clip = await rig.run()
    assert rig.fakes[ClipStage.SPEECH].runs == 2 and clip.frames
    await rig.is_sound()


@pytest.mark.parametrize("stage", list(ClipStage))
async def test_a_stage_that_takes_too_long_is_stopped(rig: Rig, stage: ClipStage) -> None:
    rig.times[stage].budget = StageBudget(0.001, 0.05)
    rig.fakes[stage].hook = stepping_on
    if stage is ClipStage.CHECK:
        clip = await rig.run()
        assert clip.check is None and clip.given_up == ("the check failed",)
    else:
        unfinished = await rig.fails()
        assert isinstance(unfinished.reason, StageTimeout) and unfinished.reason.stage == stage
    rig.times[stage].budget = StageBudget(0.01, 30.0)
    await rig.is_sound()


@pytest.mark.parametrize("stage", list(ClipStage))
async def test_a_cancelled_clip_has_stopped_when_it_says_so(rig: Rig, stage: ClipStage) -> None:
    loop = asyncio.get_running_loop()
    begun, ended = asyncio.Event(), threading.Event()

    def step_on(step: Step) -> None:
        loop.call_soon_threadsafe(begun.set)
        try:
            while True:
                step(0.5)
        finally:
            ended.set()

    rig.fakes[stage].hook = step_on
    clip = asyncio.create_task(rig.run())
    await begun.wait()
    clip.cancel()
    with pytest.raises(asyncio.CancelledError):
        await clip
    assert ended.is_set(), "its buffers would be used while it still writes"
    await rig.is_sound()


async def test_no_video_is_begun_that_cannot_be_in_time(rig: Rig) -> None:
    rig.fakes[ClipStage.SPEECH].hook = lambda step: _slow(rig.times[ClipStage.VIDEO])
    unfinished = await rig.fails(deadline_s=20.0)
    assert isinstance(unfinished.reason, OutOfTime) and unfinished.reason.stage == "video"
    assert rig.fakes[ClipStage.VIDEO].runs == 0
    assert unfinished.clip.samples and unfinished.clip.portrait_size, "what there is, is kept"
    rig.times[ClipStage.VIDEO]._seen.clear()
    await rig.is_sound()


async def test_a_clip_does_not_wait_for_anothers_video_beyond_its_deadline(rig: Rig) -> None:
    loop = asyncio.get_running_loop()
    begun, go_on = asyncio.Event(), threading.Event()

    def hold(step: Step) -> None:
        loop.call_soon_threadsafe(begun.set)
        go_on.wait(60)

    rig.fakes[ClipStage.VIDEO].hook = hold
    first = asyncio.create_task(rig.run())
    try:
        await begun.wait()
        rig.pool = BufferPool(SIZES, 1, CPU)
        unfinished = await asyncio.wait_for(rig.fails(deadline_s=3.0), 60)
        assert not first.done() and rig.fakes[ClipStage.VIDEO].runs == 1
    finally:
        go_on.set()
    assert isinstance(unfinished.reason, OutOfTime) and unfinished.reason.stage == "video"
    assert unfinished.clip.samples and (await first).frames
    await rig.is_sound()


async def test_less_is_rendered_where_the_client_allows_that(rig: Rig) -> None:
    for _ in range(10):  # 36 seconds for all that it asks for
        rig.times[ClipStage.VIDEO].observe(30.0, 0.07)

    def planned(left_s: float, *, degrade: bool) -> ClipPlan:
        return rig.pipeline.plan(ClipOrder(RECIPE, time.monotonic() + left_s, degrade))

    plan = planned(20.0, degrade=True)
    assert plan.given_up == ("6 frames a second instead of 12",), "a check takes next to nothing"
    with pytest.raises(OutOfTime, match=r"plan: 20\.0 s are left, 1 of them kept back"):
        planned(20.0, degrade=False)
    with pytest.raises(OutOfTime):
        planned(1.0, degrade=True)


async def test_a_check_that_there_is_no_time_for_is_left_out(rig: Rig) -> None:
    rig.fakes[ClipStage.VIDEO].hook = lambda step: _slow(rig.times[ClipStage.CHECK])
    clip = await rig.run(deadline_s=20.0)
    assert clip.frames and clip.check is None and clip.plan.given_up == ("no check",)


@pytest.mark.parametrize(
    "error",
    [
        MemoryLimitExceeded("too much"),
        torch.OutOfMemoryError("none left"),
        RecipeError("portrait.prompt", "no such words"),
    ],
)
async def test_whatever_a_check_ends_with_costs_nobody_the_clip(rig: Rig, error: Exception) -> None:
    rig.fakes[ClipStage.CHECK].hook = raising(error)
    clip = await rig.run()
    assert clip.frames and clip.check is None and clip.given_up == ("the check failed",)
    await rig.is_sound()


async def test_memory_beyond_the_limit_ends_a_clip_in_its_step(rig: Rig) -> None:
    def grow(step: Step) -> None:
        rig.used = 101

    rig.fakes[ClipStage.VIDEO].hook = grow
    unfinished = await rig.fails()
    assert isinstance(unfinished.reason, MemoryLimitExceeded)
    rig.used = 0
    await rig.is_sound()


def _slow(times: StageTimes) -> None:
    """From now on the stage is known to take an hour."""
    for _ in range(64):
        times.observe(3600.0, 1e-3)


async def test_a_warm_up_renders_by_every_provider_and_leaves_no_trace(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    await warm_up(rig.pipeline, rig.pool)
    assert all(fake.runs == 2 for fake in rig.fakes.values())
    assert rig.pool.free == 1
    for times in rig.times.values():
        assert times.p95_ms is None and times.seconds_per_unit != 0.01

    rig.fakes[ClipStage.VIDEO].hook = raising(RuntimeError("no such layer"))
    await warm_up(rig.pipeline, rig.pool)
    assert "the warm-up did not finish: video" in caplog.text
    assert rig.pool.free == 1

    rig.fakes[ClipStage.SPEECH].hook = raising(RecipeError("voice.name", "there is no such voice"))
    await warm_up(rig.pipeline, rig.pool)
    assert "the warm-up did not finish: recipe.voice.name" in caplog.text
    assert rig.pool.free == 1
