"""One slot from recipe to clip: speech beside portrait, then video, then the check (SL-1, SL-2).

It looks at the clock before it begins, before the video and before the check: what is left of the
deadline, less a buffer, must be enough for the work that is left. If not, less is rendered where
the client allows that, and else the slot ends there, with what it has.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import torch

from worker.errors import MemoryLimitExceeded
from worker.media.budgets import BUDGETS, Stage, StageTimes
from worker.media.buffers import Lease
from worker.media.check import CheckResult, judge, keyframes_of
from worker.media.errors import OutOfTime, SlotError
from worker.media.memory import MemoryGuard, media_log
from worker.media.plan import SAMPLE_RATE, ClipPlan, asked_for, fit, ladder
from worker.media.recipe import Recipe
from worker.media.stage_runner import StageRunner
from worker.media.stages.base import Stages, Step

T = TypeVar("T")
Progress = Callable[[Stage, float], None]
"""A stage and the share of it that is done. Called on the stage's thread."""
Shown = Callable[[Stage, float, torch.Tensor], None]
"""As ``Progress``, with a picture of what there is: a view of the slot's buffers."""

NOMINAL = ClipPlan(seconds=45.0, fps=24, size=512, has_check=True)
"""What the budgets of SL-1 are for."""
BUFFER_S = 5.0


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """``buffer_s``: kept back for what comes behind the pipeline (encoding, the way)."""

    max_size: int = 512
    max_seconds: float = 45.0
    buffer_s: float = BUFFER_S


@dataclass(slots=True)
class Clip:
    """What a slot has rendered: views of its lease's buffers, until that is closed."""

    lease: Lease
    plan: ClipPlan
    samples: int = 0
    frames: int = 0
    portrait_size: int = 0
    """Pixels of either side; 0 while there is none."""
    check: CheckResult | None = None
    stage_ms: dict[Stage, float] = field(default_factory=dict)
    total_ms: float = 0.0

    @property
    def audio(self) -> torch.Tensor:
        """``[samples]`` float32 at ``SAMPLE_RATE``."""
        return self.lease.audio(self.samples)

    @property
    def portrait(self) -> torch.Tensor:
        """``[3, size, size]`` float32."""
        return self.lease.actor(self.portrait_size)

    @property
    def video(self) -> torch.Tensor:
        """``[frames, 3, size, size]`` uint8."""
        return self.lease.video(self.frames, self.plan.size)


class Unfinished(Exception):
    """``clip`` is what there is of it; ``reason`` why it is not more. The lease is open."""

    def __init__(self, clip: Clip, reason: Exception) -> None:
        super().__init__(str(reason))
        self.clip = clip
        self.reason = reason


def nominal_times() -> dict[Stage, StageTimes]:
    """Before anything was observed."""
    units = {
        Stage.SPEECH: NOMINAL.seconds,
        Stage.PORTRAIT: NOMINAL.image_units,
        Stage.VIDEO: NOMINAL.video_units,
        Stage.CHECK: 1.0,
    }
    return {stage: StageTimes(BUDGETS[stage], units[stage]) for stage in Stage}


class SlotPipeline:
    """Renders slots; several at a time where there are leases for them: a stage serves one at a
    time, so that one slot's speech overlaps another's video."""

    def __init__(
        self,
        stages: Stages,
        times: Mapping[Stage, StageTimes],
        memory: MemoryGuard,
        device: torch.device,
        config: PipelineConfig,
    ) -> None:
        self._stages = stages
        self._config = config
        self.times = times
        self._runners = {stage: StageRunner(stage, times[stage], memory, device) for stage in Stage}

    def close(self) -> None:
        """End the threads, then the models."""
        for runner in self._runners.values():
            runner.close()
        for provider in self._stages.all():
            provider.close()

    def plan(self, recipe: Recipe, remaining_s: float, *, degrade: bool) -> ClipPlan:
        """What can be rendered of ``recipe``. Raises ``OutOfTime`` when that is nothing."""
        plan = asked_for(recipe, self._config.max_size, self._config.max_seconds)
        return self._fitted(plan, "plan", remaining_s, self.predicted_s, degrade=degrade)

    def predicted_s(self, plan: ClipPlan) -> float:
        """What all of ``plan`` takes, nearly always."""
        first_s = max(
            self.times[Stage.SPEECH].predicted_s(plan.seconds),
            self.times[Stage.PORTRAIT].predicted_s(plan.image_units),
        )
        return first_s + self._from_video_s(plan)

    def least_s(self, recipe: Recipe) -> float:
        """What the least takes that can be rendered of ``recipe``."""
        *_, least = ladder(asked_for(recipe, self._config.max_size, self._config.max_seconds))
        return self.predicted_s(least)

    def _from_video_s(self, plan: ClipPlan) -> float:
        check_s = self.times[Stage.CHECK].predicted_s(1.0) if plan.has_check else 0.0
        return self.times[Stage.VIDEO].predicted_s(plan.video_units) + check_s

    def _fitted(
        self,
        plan: ClipPlan,
        where: str,
        remaining_s: float,
        predicted_s: Callable[[ClipPlan], float],
        *,
        degrade: bool,
    ) -> ClipPlan:
        """``plan``, or what of it fits. Raises ``OutOfTime``."""
        left_s = remaining_s - self._config.buffer_s

        def fits(one: ClipPlan) -> bool:
            return predicted_s(one) <= left_s

        if fits(plan):
            return plan
        less = fit(plan, fits) if degrade else None
        if less is None:
            raise OutOfTime(
                where,
                f"{max(0.0, remaining_s):.1f} s are left, {self._config.buffer_s:g} of them kept"
                f" back, and the rest takes {predicted_s(plan):.1f} s",
            )
        return less

    async def run(
        self,
        recipe: Recipe,
        plan: ClipPlan,
        lease: Lease,
        deadline_at: float,
        said: Progress,
        *,
        degrade: bool,
        shown: Shown | None = None,
    ) -> Clip:
        """Render into ``lease``, which stays open, until ``deadline_at`` on ``time.monotonic``.

        ``shown`` gets the portrait when it is there, and frames of the video as it grows.
        Raises ``Unfinished`` with what there is. When it is cancelled, every stage has ended.
        """
        begun = time.monotonic()
        clip = Clip(lease, plan)
        try:
            await self._begin(recipe, clip, deadline_at, said, shown)
            self._fit_video(clip, deadline_at, degrade=degrade)
            async with self._runners[Stage.VIDEO].turn(deadline_at - self._config.buffer_s):
                # Another slot's video may have taken until now.
                clip.plan = self._fit_video(clip, deadline_at, degrade=degrade)
                await self._video(clip, deadline_at, said, shown)
            await self._check(recipe, clip, deadline_at, said)
        except (SlotError, MemoryLimitExceeded) as error:
            raise Unfinished(clip, error) from error
        finally:
            clip.total_ms = 1000 * (time.monotonic() - begun)
        return clip

    def _fit_video(self, clip: Clip, deadline_at: float, *, degrade: bool) -> ClipPlan:
        """What of the plan can still be in time. Raises ``OutOfTime``."""
        left_s = deadline_at - time.monotonic()
        return self._fitted(clip.plan, Stage.VIDEO, left_s, self._from_video_s, degrade=degrade)

    async def _begin(
        self,
        recipe: Recipe,
        clip: Clip,
        deadline_at: float,
        said: Progress,
        shown: Shown | None,
    ) -> None:
        """Speech and portrait. When one fails, the other is stopped and waited for."""
        plan, stages = clip.plan, self._stages
        # Longer than guessed is fine as far as buffers and the recipe go: only then it is known.
        most_s = min(recipe.video.seconds, self._config.max_seconds)
        if any(" s instead of " in each for each in plan.given_up):
            most_s = plan.seconds
        audio = clip.lease.audio(round(most_s * SAMPLE_RATE))
        actor = clip.lease.actor(plan.size)
        try:
            async with asyncio.TaskGroup() as group:
                speech = group.create_task(
                    self._timed(
                        clip,
                        Stage.SPEECH,
                        lambda step: stages.speech.render(recipe, audio, step),
                        plan.seconds,
                        deadline_at,
                        said,
                    )
                )
                group.create_task(
                    self._timed(
                        clip,
                        Stage.PORTRAIT,
                        lambda step: stages.portrait.render(recipe, actor, step),
                        plan.image_units,
                        deadline_at,
                        _showing(said, shown, lambda done: actor if done >= 1.0 else None),
                    )
                )
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        clip.samples = speech.result()
        clip.portrait_size = plan.size
        clip.plan = replace(plan, seconds=max(clip.samples, 1) / SAMPLE_RATE)

    async def _video(
        self, clip: Clip, deadline_at: float, said: Progress, shown: Shown | None
    ) -> None:
        plan = clip.plan
        actor = clip.portrait  # as large as it was rendered: the video has a size of its own
        clip.samples = min(clip.samples, plan.samples)
        video = clip.lease.video(plan.frames, plan.size)
        audio = clip.audio

        def latest(done: float) -> torch.Tensor | None:
            frames = int(done * plan.frames)
            return video[frames - 1] if frames else None

        await self._timed(
            clip,
            Stage.VIDEO,
            lambda step: self._stages.video.render(plan, actor, audio, video, step),
            plan.video_units,
            deadline_at,
            _showing(said, shown, latest),
            in_turn=True,
        )
        clip.frames = plan.frames

    async def _check(self, recipe: Recipe, clip: Clip, deadline_at: float, said: Progress) -> None:
        """A check that there is no time for, or that fails, costs nobody the clip."""
        if not clip.plan.has_check:
            return
        left_s = deadline_at - time.monotonic() - self._config.buffer_s
        if left_s < self.times[Stage.CHECK].predicted_s(1.0):
            clip.plan = replace(
                clip.plan, has_check=False, given_up=(*clip.plan.given_up, "no check")
            )
            return
        frames = clip.video[keyframes_of(clip.frames)]
        try:
            scores = await self._timed(
                clip,
                Stage.CHECK,
                lambda step: self._stages.check.score(recipe.portrait.prompt, frames, step),
                1.0,
                deadline_at,
                said,
            )
        except SlotError as error:
            media_log.warning("a clip is not checked: %s", error)
            clip.plan = replace(
                clip.plan, has_check=False, given_up=(*clip.plan.given_up, "the check failed")
            )
        else:
            clip.check = judge(scores)

    async def _timed(
        self,
        clip: Clip,
        stage: Stage,
        work: Callable[[Step], T],
        units: float,
        deadline_at: float,
        said: Progress,
        *,
        in_turn: bool = False,
    ) -> T:
        begun = time.monotonic()
        runner = self._runners[stage]
        run = runner.run_in_turn if in_turn else runner.run
        try:
            return await run(work, units, deadline_at, lambda done: said(stage, done))
        finally:
            clip.stage_ms[stage] = 1000 * (time.monotonic() - begun)


def _showing(
    said: Progress, shown: Shown | None, picture_at: Callable[[float], torch.Tensor | None]
) -> Progress:
    """``said``, and what there is to see at that share of the stage goes to ``shown``."""
    if shown is None:
        return said

    def say_and_show(stage: Stage, done: float) -> None:
        said(stage, done)
        picture = picture_at(done)
        if picture is not None:
            shown(stage, done, picture)

    return say_and_show
