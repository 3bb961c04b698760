"""Providers that do what a test says, and a pipeline of them."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import pytest
import torch

from clips.plan.budgets import BUDGETS, ClipStage, StageBudget, StageTimes
from clips.plan.plan import SAMPLE_RATE, ClipPlan
from clips.plan.recipe import Recipe, read_recipe
from clips.render.buffers import BufferPool, BufferSizes, Lease
from clips.render.clip import Clip, ClipOrder, Unfinished
from clips.render.memory import CountedMemory, Resident, clip_guard
from clips.render.pipeline import ClipPipeline
from clips.render.settings import RenderSettings
from clips.render.stages.base import ModelScore, StageProviders, Step
from worker.memory import MemoryLimits

CPU = torch.device("cpu")
SIZES = BufferSizes(size=64, frames=120, samples=5 * SAMPLE_RATE)
RECIPE = read_recipe({"schema": "1.0", "text": "Good morning", "video": {"fps": 12}})
SPOKEN_S = 1.5


@dataclass
class FakeStage:
    """Serves as any provider. ``hook`` is called in its first step, on its thread."""

    name: str
    hook: Callable[[Step], None] = lambda step: None
    runs: int = 0
    closed: bool = False
    order: list[str] = field(default_factory=list)

    def residents(self) -> Sequence[Resident]:
        return ()

    def close(self) -> None:
        self.closed = True

    def _begin(self, step: Step) -> None:
        self.runs += 1
        self.order.append(self.name)
        self.hook(step)


def stepping_on(step: Step) -> None:
    """A hook that ends only when it is stopped."""
    while True:
        step(0.5)


def raising(error: Exception) -> Callable[[Step], None]:
    """A hook that fails."""

    def fail(step: Step) -> None:
        raise error

    return fail


class FakeSpeech(FakeStage):
    def render(self, recipe: Recipe, audio: torch.Tensor, step: Step) -> int:
        self._begin(step)
        count = min(audio.numel(), round(SPOKEN_S * SAMPLE_RATE))
        audio[:count] = 0.5
        return count


class FakePortrait(FakeStage):
    def render(self, recipe: Recipe, actor: torch.Tensor, step: Step) -> None:
        self._begin(step)
        actor.fill_(0.25)


@dataclass
class FakeVideo(FakeStage):
    """``each`` hears of the pixels of each frame before that is there."""

    each: Callable[[int], None] = lambda pixels: None

    def render(
        self,
        plan: ClipPlan,
        actor: torch.Tensor,
        audio: torch.Tensor,
        video: torch.Tensor,
        step: Step,
    ) -> None:
        self._begin(step)
        for number in range(len(video)):
            step(number / len(video))
            self.each(video.shape[-1] ** 2)
            video[number] = 100


class FakeCheck(FakeStage):
    def score(
        self, prompt: str, keyframes: torch.Tensor, step: Step
    ) -> tuple[ModelScore, ModelScore]:
        self._begin(step)
        scores = (0.9,) * len(keyframes)
        return ModelScore("a", scores), ModelScore("b", scores)


class Rig:
    """A pipeline of fakes that takes hardly any time, by its own measure."""

    def __init__(
        self, times: Mapping[ClipStage, StageTimes] | None = None, sizes: BufferSizes = SIZES
    ) -> None:
        self.order: list[str] = []
        fakes = (FakeSpeech, FakePortrait, FakeVideo, FakeCheck)
        self.fakes = {
            stage: fake(stage.value, order=self.order)
            for stage, fake in zip(ClipStage, fakes, strict=True)
        }
        self.used = 0
        self.times = times or {
            stage: StageTimes(StageBudget(0.01, 30.0, BUDGETS[stage].retries), 1.0)
            for stage in ClipStage
        }
        guard = clip_guard(CountedMemory(lambda: self.used), MemoryLimits(hard_bytes=100))
        stages = StageProviders(*self.fakes.values())  # type: ignore[arg-type]
        settings = RenderSettings(size=sizes.size, seconds=5.0, buffer_s=1.0)
        self.pipeline = ClipPipeline(stages, self.times, guard, CPU, settings)
        self.pool = BufferPool(sizes, 1, CPU)
        self.said: list[tuple[ClipStage, float]] = []

    async def run(self, deadline_s: float = 600.0, *, degrade: bool = False) -> Clip:
        lease = self.pool.lease()
        assert lease is not None, "the slot before has not given its buffers back"
        self.lease: Lease = lease
        order = ClipOrder(RECIPE, time.monotonic() + deadline_s, degrade)
        return await self.pipeline.run(
            order,
            self.pipeline.plan(order),
            lease,
            lambda stage, done: self.said.append((stage, done)),
        )

    async def fails(self, deadline_s: float = 600.0) -> Unfinished:
        with pytest.raises(Unfinished) as caught:
            await self.run(deadline_s)
        return caught.value

    async def is_sound(self) -> None:
        """The next clip is right, in the same buffers."""
        self.lease.close()
        for fake in self.fakes.values():
            fake.hook = lambda step: None
        clip = await self.run()
        assert clip.frames == clip.plan.frames == round(SPOKEN_S * 12)
        assert clip.samples == round(SPOKEN_S * SAMPLE_RATE)
        assert int(clip.video.min()) == int(clip.video.max()) == 100
        assert float(clip.audio.min()) == 0.5 and float(clip.portrait.max()) == 0.25
        self.lease.close()
        assert self.pool.free == 1
