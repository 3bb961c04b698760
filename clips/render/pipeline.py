"""Renders clips: speech and portrait in parallel, then video, then the check (SL-1, SL-2).

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
from typing import Final, TypeVar

import torch

from clips.plan.budgets import ClipStage, StageTimes
from clips.plan.plan import SAMPLE_RATE, ClipPlan, asked_for, fit, least
from clips.plan.recipe import Recipe
from clips.render.buffers import Lease
from clips.render.clip import Clip, ClipOrder, Unfinished, judge, keyframes_of
from clips.render.errors import BehindPace, ClipError, OutOfTime
from clips.render.memory import media_log
from clips.render.settings import RenderSettings
from clips.render.stage_runner import StageRunner
from clips.render.stages.base import StageProviders, Step
from worker.errors import MemoryLimitExceeded, RequestError
from worker.memory import MemoryGuard

T = TypeVar("T")
Progress = Callable[[ClipStage, float], None]
"""Called on a stage's thread with the stage and its progress (0 to 1)."""

Pace = Callable[[StageTimes, float], float]
"""A method of ``StageTimes``: seconds that a stage takes for an amount of work."""
LIKELY: Final[Pace] = StageTimes.likely_s
HOPED: Final[Pace] = StageTimes.hoped_s
LEAST: Final[Pace] = StageTimes.least_s

_WATCHED = 0.1
"""Share of a video's time after which its pace is checked."""


@dataclass(frozen=True, slots=True)
class ClipPrediction:
    """Predicts times of the stages; ``buffer_s`` seconds of every deadline are reserved."""

    times: Mapping[ClipStage, StageTimes]
    buffer_s: float

    def stage_s(self, stage: ClipStage, plan: ClipPlan, pace: Pace) -> float:
        return pace(self.times[stage], plan.units[stage])

    def first_s(self, plan: ClipPlan, pace: Pace) -> float:
        """Seconds that speech and portrait take in parallel."""
        both = ClipStage.SPEECH, ClipStage.PORTRAIT
        return max(self.stage_s(stage, plan, pace) for stage in both)

    def from_video_s(self, plan: ClipPlan, pace: Pace) -> float:
        """Seconds that video and check take."""
        both = ClipStage.VIDEO, ClipStage.CHECK
        return sum(self.stage_s(stage, plan, pace) for stage in both)

    def all_s(self, plan: ClipPlan, pace: Pace) -> float:
        """Seconds that all of ``plan`` takes."""
        return self.first_s(plan, pace) + self.from_video_s(plan, pace)

    def fitted(
        self,
        plan: ClipPlan,
        where: str,
        order: ClipOrder,
        takes_s: Callable[[ClipPlan, Pace], float],
    ) -> ClipPlan:
        """``plan``, or the best version of it that fits in the time if parts may be dropped. Raises
        ``OutOfTime`` if it is certain to be late; if it is only probably late, it is tried."""
        remaining_s = order.left_s
        left_s = remaining_s - self.buffer_s
        if order.degrade:
            found = fit(plan, lambda one: takes_s(one, HOPED) <= left_s)
            if found is not None:
                return found
            plan = least(plan)
        if takes_s(plan, LEAST) <= left_s:
            return plan
        raise OutOfTime(
            where,
            f"{max(0.0, remaining_s):.1f} s are left, {self.buffer_s:g} of them kept"
            f" back, and the rest takes {takes_s(plan, LEAST):.1f} s at the least",
        )


class ClipPipeline:
    """Renders clips, several at a time if there are enough leases. A stage serves one clip at a
    time, so that one clip's speech overlaps another's video."""

    def __init__(
        self,
        providers: StageProviders,
        times: Mapping[ClipStage, StageTimes],
        memory: MemoryGuard,
        device: torch.device,
        settings: RenderSettings,
        check_device: Callable[[], None] | None = None,
    ) -> None:
        """``check_device``: see ``StageRunner``."""
        self.providers = providers
        self.times = times
        self.memory = memory
        self.settings = settings
        self.prediction = ClipPrediction(times, settings.buffer_s)
        self.runners = {
            stage: StageRunner(stage, times[stage], memory, device, check_device)
            for stage in ClipStage
        }

    def close(self) -> None:
        """End the threads, then release the models."""
        for runner in self.runners.values():
            runner.close()
        for provider in self.providers.by_stage().values():
            provider.close()

    def whole(self, recipe: Recipe) -> ClipPlan:
        """The full plan of ``recipe``, within the buffers' sizes, independent of time."""
        return asked_for(recipe, self.settings.size, self.settings.seconds)

    def least(self, order: ClipOrder) -> ClipPlan:
        """The minimum plan; the full plan if nothing may be dropped."""
        whole = self.whole(order.recipe)
        return least(whole) if order.degrade else whole

    def plan(self, order: ClipOrder) -> ClipPlan:
        """The plan with which to start. Raises ``OutOfTime`` if even that is certain to be late."""
        whole, takes_s = self.whole(order.recipe), self.prediction.all_s
        return self.prediction.fitted(whole, "plan", order, takes_s)

    async def run(self, order: ClipOrder, plan: ClipPlan, lease: Lease, said: Progress) -> Clip:
        """Render into ``lease``, which stays open.

        Raises ``Unfinished`` with the partial clip, or ``DeviceLost``. After a cancel, every stage
        has ended.
        """
        begun = time.monotonic()
        clip = Clip(lease, plan)
        try:
            await _Rendering(self, order, clip, said).run()
        except (ClipError, MemoryLimitExceeded) as error:
            raise Unfinished(clip, error) from error
        finally:
            clip.total_ms = 1000 * (time.monotonic() - begun)
        return clip


class _Rendering:
    """Renders one clip, once."""

    def __init__(
        self, pipeline: ClipPipeline, order: ClipOrder, clip: Clip, said: Progress
    ) -> None:
        self._providers = pipeline.providers
        self._prediction = pipeline.prediction
        self._runners = pipeline.runners
        self._order = order
        self._whole = pipeline.whole(order.recipe)
        # Speech may be longer than estimated, within buffers and recipe.
        self._most_s = min(order.recipe.video.seconds, pipeline.settings.seconds)
        self._clip = clip
        self._said = said
        self._until = order.deadline_at - pipeline.prediction.buffer_s
        """When the last stage must end, on ``time.monotonic``."""

    async def run(self) -> None:
        """Render the clip. Raises ``ClipError``, ``MemoryLimitExceeded``."""
        clip, order = self._clip, self._order
        spoken = await self._begin()
        clip.plan = self._fit_video(spoken)
        until = order.deadline_at if order.keep_on else self._until
        async with self._runners[ClipStage.VIDEO].turn(until):
            # Another clip's video may have taken until now.
            clip.plan = self._fit_video(spoken)
            await self._pace_video(spoken)
        await self._check()

    async def _begin(self) -> ClipPlan:
        """Render speech and portrait; return the largest plan that they allow. If one fails, stop
        the other and wait for it."""
        clip, recipe, providers = self._clip, self._order.recipe, self._providers
        plan = self._first_plan()
        most_s = plan.seconds if plan.seconds < self._whole.seconds else self._most_s
        audio = clip.lease.audio(round(most_s * SAMPLE_RATE))
        actor = clip.lease.actor(plan.size)

        def speak(step: Step) -> int:
            return providers.speech.render(recipe, audio, step)

        def draw(step: Step) -> None:
            providers.portrait.render(recipe, actor, step)

        until = self._order.deadline_at
        try:
            async with asyncio.TaskGroup() as group:
                speech = group.create_task(self._run(ClipStage.SPEECH, speak, plan, until))
                group.create_task(self._run(ClipStage.PORTRAIT, draw, plan, until))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        clip.samples = speech.result()
        clip.portrait_size = plan.size
        seconds, asked = max(clip.samples, 1) / SAMPLE_RATE, self._whole.asked or self._whole
        if most_s != plan.seconds or clip.samples < audio.numel():  # nothing was cut off
            asked = replace(asked, seconds=seconds)
        return replace(self._whole, seconds=seconds, size=plan.size, asked=asked)

    def _first_plan(self) -> ClipPlan:
        """The plan for speech and portrait. If parts may be dropped, it leaves time for the planned
        video, because the video could not use more."""
        prediction, planned = self._prediction, self._clip.plan
        if not self._order.degrade:
            return self._whole
        left_s = self._until - time.monotonic() - prediction.from_video_s(planned, HOPED)
        return fit(self._whole, lambda one: prediction.first_s(one, LIKELY) <= left_s) or planned

    def _fit_video(self, spoken: ClipPlan, seconds_per_unit: float = 0.0) -> ClipPlan:
        """The largest part of ``spoken`` that can be in time if a unit takes at least
        ``seconds_per_unit``. Raises ``OutOfTime``."""
        prediction, order = self._prediction, self._order
        video = prediction.times[ClipStage.VIDEO]

        def takes_s(plan: ClipPlan, pace: Pace) -> float:
            units = plan.units[ClipStage.VIDEO]
            video_s = max(seconds_per_unit * units, pace(video, units))
            if pace is HOPED and video_s > video.timeout_s(units):
                return math.inf  # its timeout would stop the stage, regardless of the deadline
            return video_s + prediction.stage_s(ClipStage.CHECK, plan, pace)

        try:
            return prediction.fitted(spoken, ClipStage.VIDEO, order, takes_s)
        except OutOfTime:
            if not order.keep_on:
                raise
            self._clip.spared = True
            return least(spoken) if order.degrade else spoken

    async def _pace_video(self, spoken: ClipPlan) -> None:
        """Render the video; start over with less if it is too slow."""
        clip = self._clip
        while self._order.degrade:
            try:
                return await self._video(is_watched=True)
            except BehindPace as behind:
                less = self._fit_video(spoken, behind.seconds_per_unit)
                if less == clip.plan:
                    break
                clip.plan = less
        await self._video()

    async def _video(self, *, is_watched: bool = False) -> None:
        """Render the video. May raise ``BehindPace`` if it ``is_watched``."""
        clip, plan = self._clip, self._clip.plan
        actor = clip.portrait  # in its rendered size: the video has its own size
        samples = min(clip.samples, plan.samples)
        video = clip.lease.video(plan.frames, plan.size)
        audio = clip.lease.audio(samples)
        watch = None
        if is_watched:
            units = plan.units[ClipStage.VIDEO]
            timeout_s = self._prediction.times[ClipStage.VIDEO].timeout_s(units)
            watch = _pace_watch(min(self._until, time.monotonic() + timeout_s), units)

        def render(step: Step) -> None:
            self._providers.video.render(plan, actor, audio, video, step)

        await self._run(ClipStage.VIDEO, render, plan, self._order.deadline_at, watch, in_turn=True)
        clip.samples = samples
        clip.frames = plan.frames

    async def _check(self) -> None:
        """Check the clip. If there is no time for a check, or it fails, the clip is unchanged."""
        clip, check = self._clip, self._providers.check
        if not self._whole.has_check:
            return
        hoped_s = self._prediction.times[ClipStage.CHECK].hoped_s(1.0)
        clip.plan = replace(clip.plan, has_check=hoped_s <= self._until - time.monotonic())
        if not clip.plan.has_check:
            return
        frames = clip.video[keyframes_of(clip.frames)]
        prompt = self._order.recipe.portrait.prompt
        try:
            # The encoder follows; its time is reserved.
            scores = await self._run(
                ClipStage.CHECK,
                lambda step: check.score(prompt, frames, step),
                clip.plan,
                self._until,
            )
        except (ClipError, MemoryLimitExceeded, RequestError) as error:
            media_log.warning("a clip is not checked: %s", error)
            clip.has_failed_check = True
        else:
            clip.check = judge(scores)

    async def _run(
        self,
        stage: ClipStage,
        work: Callable[[Step], T],
        plan: ClipPlan,
        until: float,
        watch: Callable[[float], None] | None = None,
        *,
        in_turn: bool = False,
    ) -> T:
        """Run a stage, and record its time. ``watch`` gets the progress (0 to 1), and may raise to
        end it. ``in_turn``: the stage is held already."""

        def progress(done: float) -> None:
            if watch is not None:
                watch(done)
            self._said(stage, done)

        begun, runner = time.monotonic(), self._runners[stage]
        run = runner.run_in_turn if in_turn else runner.run
        try:
            return await run(work, plan.units[stage], until, progress)
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
