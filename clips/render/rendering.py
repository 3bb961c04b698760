"""Renders one clip: speech and portrait in parallel, then video, then the check (SL-1, SL-2).

Before the video and before the check, the time left, minus a buffer, must be enough for the
remaining work. If it is not, parts are dropped if the client allows that; otherwise the clip ends
there, with its finished parts. Each choice starts again from the full request. So a dropped part
can come back if a stage was fast. A video that would be late at its current pace restarts with a
smaller plan.
"""

import asyncio
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from clips.plan.budgets import ClipStage, StageTimes
from clips.plan.plan import SAMPLE_RATE, ClipPlan, fit, least
from clips.plan.recipe import Recipe
from clips.render.clip import Clip, judge, keyframes_of
from clips.render.errors import BehindPace, ClipError, OutOfTime
from clips.render.memory import media_log
from clips.render.prediction import HOPED, LIKELY, ClipPrediction, Pace
from clips.render.stage_runner import StageJob, StageRunner
from clips.render.stages.base import StageProviders, Step
from worker.errors import MemoryLimitExceeded, RequestError

T = TypeVar("T")
Progress = Callable[[ClipStage, float], None]
"""Called on a stage's thread with the stage and its progress (0 to 1)."""

_WATCHED = 0.1
"""Share of a video's time after which its pace is checked."""


@dataclass(frozen=True, slots=True)
class ClipOrder:
    """A request for a clip. ``plan`` is the full plan; ``deadline_at`` is on ``time.monotonic``;
    ``degrade``: drop parts rather than be late; ``keep_on``: only the deadline stops it."""

    recipe: Recipe
    plan: ClipPlan
    deadline_at: float
    max_seconds: float
    degrade: bool
    keep_on: bool = False


class Rendering:
    """Renders one clip, once."""

    def __init__(
        self,
        order: ClipOrder,
        clip: Clip,
        stages: StageProviders,
        prediction: ClipPrediction,
        runners: Mapping[ClipStage, StageRunner],
        said: Progress,
    ) -> None:
        self._order = order
        self._clip = clip
        self._stages = stages
        self._prediction = prediction
        self._runners = runners
        self._said = said

    async def run(self) -> None:
        """Render the clip. Raises ``ClipError``, ``MemoryLimitExceeded``."""
        clip, order = self._clip, self._order
        whole = await self._begin()
        clip.plan = self._fit_video(whole)
        async with self._runners[ClipStage.VIDEO].turn(
            order.deadline_at - (0.0 if order.keep_on else self._prediction.buffer_s)
        ):
            # Another clip's video may have taken until now.
            clip.plan = self._fit_video(whole)
            await self._pace_video(whole)
        await self._check()

    @property
    def _left_s(self) -> float:
        return self._order.deadline_at - time.monotonic()

    @property
    def _until(self) -> float:
        """When the last stage must end, on ``time.monotonic``."""
        return self._order.deadline_at - self._prediction.buffer_s

    def _fit_video(self, whole: ClipPlan, seconds_per_unit: float = 0.0) -> ClipPlan:
        """The largest part of ``whole`` that can be in time if a unit takes at least
        ``seconds_per_unit``. Raises ``OutOfTime``."""
        prediction, order = self._prediction, self._order
        video = prediction.video

        def takes_s(plan: ClipPlan, pace: Pace) -> float:
            video_s = max(seconds_per_unit * plan.video_units, pace(video, plan.video_units))
            if pace is HOPED and video_s > video.timeout_s(plan.video_units):
                return math.inf  # its timeout would stop the stage, regardless of the deadline
            return video_s + prediction.check_s(plan, pace)

        try:
            return prediction.fitted(
                whole, ClipStage.VIDEO, self._left_s, takes_s, degrade=order.degrade
            )
        except OutOfTime:
            if not order.keep_on:
                raise
            self._clip.spared = True
            return least(whole) if order.degrade else whole

    async def _pace_video(self, whole: ClipPlan) -> None:
        """Render the video; start over with less if it is too slow."""
        clip = self._clip
        while self._order.degrade:
            try:
                return await self._video(is_watched=True)
            except BehindPace as behind:
                less = self._fit_video(whole, behind.seconds_per_unit)
                if less == clip.plan:
                    break
                clip.plan = less
        await self._video()

    async def _begin(self) -> ClipPlan:
        """Render speech and portrait; return the largest plan that they allow. If one fails, stop
        the other and wait for it."""
        clip, recipe, stages = self._clip, self._order.recipe, self._stages
        plan, prediction = self._first_plan(), self._prediction
        # Speech may be longer than estimated, within buffers and recipe; only now it is known.
        most_s = min(recipe.video.seconds, self._order.max_seconds)
        if plan.seconds < self._order.plan.seconds:
            most_s = plan.seconds
        audio = clip.lease.audio(round(most_s * SAMPLE_RATE))
        actor = clip.lease.actor(plan.size)

        def speak(step: Step) -> int:
            return stages.speech.render(recipe, audio, step)

        def draw(step: Step) -> None:
            stages.portrait.render(recipe, actor, step)

        until = self._order.deadline_at
        speech_job = self._job(ClipStage.SPEECH, speak, plan.seconds, prediction.speech)
        portrait_job = self._job(ClipStage.PORTRAIT, draw, plan.image_units, prediction.portrait)
        try:
            async with asyncio.TaskGroup() as group:
                speech = group.create_task(self._timed(ClipStage.SPEECH, speech_job, until))
                group.create_task(self._timed(ClipStage.PORTRAIT, portrait_job, until))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        clip.samples = speech.result()
        clip.portrait_size = plan.size
        is_cut = most_s == plan.seconds and clip.samples >= audio.numel()
        return self._spoken_plan(is_cut=is_cut)

    def _first_plan(self) -> ClipPlan:
        """The plan for speech and portrait. If parts may be dropped, it leaves time for the planned
        video, because the video could not use more."""
        whole, prediction = self._order.plan, self._prediction
        if not self._order.degrade:
            return whole
        left_s = self._left_s - prediction.buffer_s
        left_s -= prediction.from_video_s(self._clip.plan, HOPED)
        return fit(whole, lambda one: prediction.first_s(one, LIKELY) <= left_s) or self._clip.plan

    def _spoken_plan(self, *, is_cut: bool) -> ClipPlan:
        """The largest plan that the finished speech and portrait allow."""
        clip, whole = self._clip, self._order.plan
        seconds = max(clip.samples, 1) / SAMPLE_RATE
        asked = whole.asked or whole
        if not is_cut:
            asked = replace(asked, seconds=seconds)
        return replace(whole, seconds=seconds, size=clip.portrait_size, asked=asked)

    async def _video(self, *, is_watched: bool = False) -> None:
        """Render the video. May raise ``BehindPace`` if it ``is_watched``."""
        clip, plan = self._clip, self._clip.plan
        actor = clip.portrait  # in its rendered size: the video has its own size
        samples = min(clip.samples, plan.samples)
        video = clip.lease.video(plan.frames, plan.size)
        audio = clip.lease.audio(samples)
        times, units = self._prediction.video, plan.video_units
        until = min(self._until, time.monotonic() + times.timeout_s(units))
        watch = _pace_watch(until, units) if is_watched else None

        def render(step: Step) -> None:
            self._stages.video.render(plan, actor, audio, video, step)

        job = self._job(ClipStage.VIDEO, render, units, times, watch)
        await self._timed(ClipStage.VIDEO, job, self._order.deadline_at, in_turn=True)
        clip.samples = samples
        clip.frames = plan.frames

    async def _check(self) -> None:
        """Check the clip. If there is no time for a check, or it fails, the clip is unchanged."""
        clip, times = self._clip, self._prediction.check
        if not self._order.plan.has_check:
            return
        has_time = times.hoped_s(1.0) <= self._left_s - self._prediction.buffer_s
        clip.plan = clip.plan.changed(has_check=has_time)
        if not has_time:
            return
        frames = clip.video[keyframes_of(clip.frames)]
        prompt = self._order.recipe.portrait.prompt
        job = self._job(
            ClipStage.CHECK, lambda step: self._stages.check.score(prompt, frames, step), 1.0, times
        )
        try:
            # The encoder follows; its time is reserved.
            scores = await self._timed(ClipStage.CHECK, job, self._until)
        except (ClipError, MemoryLimitExceeded, RequestError) as error:
            media_log.warning("a clip is not checked: %s", error)
            clip.has_failed_check = True
        else:
            clip.check = judge(scores)

    def _job(
        self,
        stage: ClipStage,
        work: Callable[[Step], T],
        units: float,
        times: StageTimes,
        watch: Callable[[float], None] | None = None,
    ) -> StageJob[T]:
        """A run of a stage. ``watch`` gets the progress (0 to 1), and may raise to end it."""

        def progress(done: float) -> None:
            if watch is not None:
                watch(done)
            self._said(stage, done)

        return StageJob(work, units, times, progress)

    async def _timed(
        self, stage: ClipStage, job: StageJob[T], until: float, *, in_turn: bool = False
    ) -> T:
        begun = time.monotonic()
        runner = self._runners[stage]
        run = runner.run_in_turn if in_turn else runner.run
        try:
            return await run(job, until)
        finally:
            spent_ms = 1000 * (time.monotonic() - begun)
            self._clip.stage_ms[stage] = self._clip.stage_ms.get(stage, 0.0) + spent_ms


def _pace_watch(until: float, units: float) -> Callable[[float], None]:
    """A watch that raises ``BehindPace`` if a stage that starts now will not finish by
    ``until``."""
    begun = time.monotonic()
    judged_at = begun + _WATCHED * (until - begun)

    def watch(done: float) -> None:
        nonlocal judged_at
        now = time.monotonic()
        if now < judged_at or done <= 0.0:
            return
        judged_at = math.inf
        if begun + (now - begun) / done > until:
            raise BehindPace(ClipStage.VIDEO, (now - begun) / (done * units))

    return watch
