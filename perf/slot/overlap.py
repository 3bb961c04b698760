"""What overlapping is worth where stages do not take the same two cores from each other: providers
that only wait, for a tenth of SL-1's stage targets (2, 12, 8 and 1 s), in the real pipeline.

No model of any hardware: it says what the order of stages allows, not what a GPU would do, on which
portrait and video compete too.
"""

import asyncio
import time
from collections.abc import Sequence

import torch

from perf.report.bundle import Figure
from perf.slot.naive import NaivePipeline
from perf.slot.rig import Rig
from worker.media import encode
from worker.media.budgets import BUDGETS, Stage
from worker.media.buffers import BufferPool, BufferSizes
from worker.media.memory import CountedMemory, Resident, slot_guard
from worker.media.pipeline import PipelineConfig, SlotPipeline, nominal_times
from worker.media.plan import SAMPLE_RATE, ClipPlan
from worker.media.recipe import Recipe, read_recipe
from worker.media.stages.base import ModelScore, Stages, Step
from worker.media.stages.providers import Providers

_SCALE = 0.1
_STEPS = 20
_SIZE = 64
_SECONDS = 1.0
_DEADLINE_S = 600.0
_RECIPE = read_recipe({"schema": "1.0", "text": "Good morning", "video": {"fps": 6}})
_CPU = torch.device("cpu")


class _Waits:
    """Any stage."""

    name = "waits"

    def __init__(self, stage: Stage) -> None:
        self._step_s = _SCALE * BUDGETS[stage].target_s / _STEPS

    def residents(self) -> Sequence[Resident]:
        return ()

    def close(self) -> None:
        """There is nothing to free."""

    def wait(self, step: Step) -> None:
        for number in range(_STEPS):
            step(number / _STEPS)
            time.sleep(self._step_s)


class _Speech(_Waits):
    def render(self, recipe: Recipe, audio: torch.Tensor, step: Step) -> int:
        self.wait(step)
        return round(_SECONDS * SAMPLE_RATE)


class _Portrait(_Waits):
    def render(self, recipe: Recipe, actor: torch.Tensor, step: Step) -> None:
        self.wait(step)


class _Video(_Waits):
    def render(
        self,
        plan: ClipPlan,
        actor: torch.Tensor,
        audio: torch.Tensor,
        video: torch.Tensor,
        step: Step,
    ) -> None:
        self.wait(step)


class _Check(_Waits):
    def score(
        self, prompt: str, keyframes: torch.Tensor, step: Step
    ) -> tuple[ModelScore, ModelScore]:
        self.wait(step)
        score = ModelScore("waits", (0.9,) * len(keyframes))
        return score, score


def _stages() -> Stages:
    return Stages(
        _Speech(Stage.SPEECH), _Portrait(Stage.PORTRAIT), _Video(Stage.VIDEO), _Check(Stage.CHECK)
    )


async def _ours(clips: int, slots: int) -> float:
    """Seconds for so many clips, ``slots`` at once."""
    sizes = BufferSizes(_SIZE, 30, 2 * SAMPLE_RATE)
    pool = BufferPool(sizes, slots, _CPU)
    config = PipelineConfig(_SIZE, 2.0, buffer_s=0.0)
    guard = slot_guard(CountedMemory(lambda: 0))
    pipeline = SlotPipeline(Providers.single(_stages()), nominal_times(), guard, _CPU, config)
    free = asyncio.Semaphore(slots)

    async def one() -> None:
        async with free:
            lease = pool.lease()
            assert lease is not None
            with lease:
                deadline_at = time.monotonic() + _DEADLINE_S
                plan = pipeline.plan(_RECIPE, _DEADLINE_S, degrade=False)
                clip = await pipeline.run(
                    _RECIPE, plan, lease, deadline_at, lambda stage, done: None, degrade=False
                )
                await asyncio.to_thread(encode.mp4, clip.video, clip.audio, clip.plan.fps)

    begun = time.monotonic()
    try:
        await asyncio.gather(*(one() for _ in range(clips)))
        return time.monotonic() - begun
    finally:
        await asyncio.to_thread(pipeline.close)


def _naive(clips: int) -> float:
    pipeline = NaivePipeline(_stages(), _SIZE, _SECONDS)
    begun = time.monotonic()
    for _ in range(clips):
        pipeline.render(_RECIPE)
    return time.monotonic() - begun


async def run(rig: Rig) -> list[Figure]:
    rounds, several = (1, 3) if rig.quick else (2, 4)
    gains: dict[str, list[float]] = {}
    await asyncio.to_thread(_naive, 1)  # threads and the encoder's library are there
    await _ours(1, 1)
    for _ in range(rounds):
        alone_s = await asyncio.to_thread(_naive, 1)
        gains.setdefault("1", []).append(alone_s / await _ours(1, 1))
        naive_s = await asyncio.to_thread(_naive, several)
        for slots in (2, 3):
            gains.setdefault(str(slots), []).append(naive_s / await _ours(several, slots))
    labels = {
        "1": "one clip: sooner than one stage after the other, times",
        "2": f"{several} clips, 2 slots: clips per minute, times",
        "3": f"{several} clips, 3 slots: clips per minute, times",
    }
    return [
        Figure.of(f"overlap.{key}", label, "", gains[key], better="higher", tolerance=1.5)
        for key, label in labels.items()
    ]
