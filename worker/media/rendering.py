"""One slot from recipe to clip: speech beside portrait, then video, then the check (SL-1, SL-2).

It looks at the clock before the video and before the check: what is left of the deadline, less a
buffer, must be enough for the work that is left. If not, less is rendered where the client allows
that, and else the slot ends there, with what it has.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from worker.errors import MemoryLimitExceeded, RequestError
from worker.media.budgets import Stage, StageTimes
from worker.media.check import judge, keyframes_of
from worker.media.clip import Clip
from worker.media.errors import SlotError
from worker.media.memory import media_log
from worker.media.plan import SAMPLE_RATE, ClipPlan
from worker.media.prediction import Prediction
from worker.media.recipe import Recipe
from worker.media.stage_runner import Job, StageRunner
from worker.media.stages.base import Stages, Step

T = TypeVar("T")
Progress = Callable[[Stage, float], None]
"""A stage and the share of it that is done. Called on the stage's thread."""
Shown = Callable[[Stage, float, torch.Tensor], None]
"""As ``Progress``, with a picture of what there is: a view of the slot's buffers."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is asked for. ``deadline_at`` is on ``time.monotonic``; ``degrade``: less is better than
    late."""

    recipe: Recipe
    deadline_at: float
    max_seconds: float
    degrade: bool


class Rendering:
    """Renders one clip, once."""

    def __init__(
        self,
        order: Order,
        clip: Clip,
        stages: Stages,
        prediction: Prediction,
        runners: Mapping[Stage, StageRunner],
        said: Progress,
        shown: Shown | None,
    ) -> None:
        self._order = order
        self._clip = clip
        self._stages = stages
        self._prediction = prediction
        self._runners = runners
        self._said = said
        self._shown = shown

    async def run(self) -> None:
        """Raises ``SlotError``, ``MemoryLimitExceeded``."""
        clip, until = self._clip, self._order.deadline_at - self._prediction.buffer_s
        await self._begin()
        self._fit_video()
        async with self._runners[Stage.VIDEO].turn(until):
            # Another slot's video may have taken until now.
            clip.plan = self._fit_video()
            await self._video()
        await self._check()

    @property
    def _left_s(self) -> float:
        return self._order.deadline_at - time.monotonic()

    def _fit_video(self) -> ClipPlan:
        """What of the plan can still be in time. Raises ``OutOfTime``."""
        prediction = self._prediction
        return prediction.fitted(
            self._clip.plan,
            Stage.VIDEO,
            self._left_s,
            prediction.from_video_s,
            degrade=self._order.degrade,
        )

    async def _begin(self) -> None:
        """Speech and portrait. When one fails, the other is stopped and waited for."""
        clip, recipe, stages = self._clip, self._order.recipe, self._stages
        plan, prediction = clip.plan, self._prediction
        # Longer than guessed is fine as far as buffers and the recipe go: only then it is known.
        most_s = min(recipe.video.seconds, self._order.max_seconds)
        if any(" s instead of " in each for each in plan.given_up):
            most_s = plan.seconds
        audio = clip.lease.audio(round(most_s * SAMPLE_RATE))
        actor = clip.lease.actor(plan.size)

        def speak(step: Step) -> int:
            return stages.speech.render(recipe, audio, step)

        def draw(step: Step) -> None:
            stages.portrait.render(recipe, actor, step)

        def drawn(done: float) -> torch.Tensor | None:
            return actor if done >= 1.0 else None

        until = self._order.deadline_at
        speech_job = self._job(Stage.SPEECH, speak, plan.seconds, prediction.speech)
        portrait_job = self._job(Stage.PORTRAIT, draw, plan.image_units, prediction.portrait, drawn)
        try:
            async with asyncio.TaskGroup() as group:
                speech = group.create_task(self._timed(Stage.SPEECH, speech_job, until))
                group.create_task(self._timed(Stage.PORTRAIT, portrait_job, until))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        clip.samples = speech.result()
        clip.portrait_size = plan.size
        clip.plan = replace(plan, seconds=max(clip.samples, 1) / SAMPLE_RATE)

    async def _video(self) -> None:
        clip, plan = self._clip, self._clip.plan
        actor = clip.portrait  # as large as it was rendered: the video has a size of its own
        clip.samples = min(clip.samples, plan.samples)
        video = clip.lease.video(plan.frames, plan.size)
        audio = clip.audio

        def render(step: Step) -> None:
            self._stages.video.render(plan, actor, audio, video, step)

        def latest(done: float) -> torch.Tensor | None:
            frames = int(done * plan.frames)
            return video[frames - 1] if frames else None

        job = self._job(Stage.VIDEO, render, plan.video_units, self._prediction.video, latest)
        await self._timed(Stage.VIDEO, job, self._order.deadline_at, in_turn=True)
        clip.frames = plan.frames

    async def _check(self) -> None:
        """A check that there is no time for, or that fails, costs nobody the clip."""
        clip, times = self._clip, self._prediction.check
        if not clip.plan.has_check:
            return
        if self._left_s - self._prediction.buffer_s < times.predicted_s(1.0):
            self._give_up_check("no check")
            return
        frames = clip.video[keyframes_of(clip.frames)]
        prompt = self._order.recipe.portrait.prompt
        job = self._job(
            Stage.CHECK, lambda step: self._stages.check.score(prompt, frames, step), 1.0, times
        )
        try:
            # Behind it comes the encoder, whose time is kept back.
            until = self._order.deadline_at - self._prediction.buffer_s
            scores = await self._timed(Stage.CHECK, job, until)
        except (SlotError, MemoryLimitExceeded, RequestError) as error:
            media_log.warning("a clip is not checked: %s", error)
            self._give_up_check("the check failed")
        else:
            clip.check = judge(scores)

    def _give_up_check(self, why: str) -> None:
        plan = self._clip.plan
        self._clip.plan = replace(plan, has_check=False, given_up=(*plan.given_up, why))

    def _job(
        self,
        stage: Stage,
        work: Callable[[Step], T],
        units: float,
        times: StageTimes,
        picture_at: Callable[[float], torch.Tensor | None] | None = None,
    ) -> Job[T]:
        """``picture_at``: what there is to see when a share of the stage is done."""
        said, shown = self._said, self._shown

        def progress(done: float) -> None:
            said(stage, done)
            if shown is not None and picture_at is not None:
                picture = picture_at(done)
                if picture is not None:
                    shown(stage, done, picture)

        return Job(work, units, times, progress)

    async def _timed(self, stage: Stage, job: Job[T], until: float, *, in_turn: bool = False) -> T:
        begun = time.monotonic()
        runner = self._runners[stage]
        run = runner.run_in_turn if in_turn else runner.run
        try:
            return await run(job, until)
        finally:
            self._clip.stage_ms[stage] = 1000 * (time.monotonic() - begun)
