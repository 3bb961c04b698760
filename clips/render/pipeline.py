"""Renders clips from their recipes, and predicts which parts fit in the time (SL-1, SL-2)."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from clips.plan.budgets import BUDGETS, Activity, ClipStage, StageTimes
from clips.plan.plan import BUFFER_S, NOMINAL, ClipPlan, asked_for, least
from clips.plan.recipe import Recipe
from clips.render.buffers import Lease
from clips.render.clip import Clip, Unfinished
from clips.render.errors import ClipError
from clips.render.prediction import ClipPrediction, Pace
from clips.render.rendering import ClipOrder, Progress, Rendering
from clips.render.stage_runner import StageRunner
from clips.render.stages.base import StageProviders
from worker.errors import MemoryLimitExceeded
from worker.memory import MemoryGuard


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """Settings of a pipeline. ``buffer_s``: seconds reserved for the steps after it (encoding, the
    network). ``nice``: niceness of stages on the CPU."""

    max_size: int = 512
    max_seconds: float = 45.0
    buffer_s: float = BUFFER_S
    nice: int = 0


def nominal_times() -> dict[ClipStage, StageTimes]:
    """Times of all stages, before anything was observed."""
    units = {
        ClipStage.SPEECH: NOMINAL.seconds,
        ClipStage.PORTRAIT: NOMINAL.image_units,
        ClipStage.VIDEO: NOMINAL.video_units,
        ClipStage.CHECK: 1.0,
    }
    activity = Activity()
    return {stage: StageTimes(BUDGETS[stage], units[stage], activity) for stage in ClipStage}


class ClipPipeline:
    """Renders clips, several at a time if there are enough leases. A stage serves one clip at a
    time, so that one clip's speech overlaps another's video."""

    def __init__(
        self,
        providers: StageProviders,
        times: Mapping[ClipStage, StageTimes],
        memory: MemoryGuard,
        device: torch.device,
        config: PipelineConfig,
        check_device: Callable[[], None] | None = None,
    ) -> None:
        """``check_device``: see ``StageRunner``."""
        self.providers = providers
        self._config = config
        self.times = times
        self._prediction = ClipPrediction(
            times[ClipStage.SPEECH],
            times[ClipStage.PORTRAIT],
            times[ClipStage.VIDEO],
            times[ClipStage.CHECK],
            config.buffer_s,
        )
        self._runners = {
            stage: StageRunner(stage, memory, device, config.nice, check_device)
            for stage in ClipStage
        }

    def close(self) -> None:
        """End the threads, then release the models."""
        for runner in self._runners.values():
            runner.close()
        for provider in self.providers.by_stage().values():
            provider.close()

    def plan(self, recipe: Recipe, remaining_s: float, *, degrade: bool) -> ClipPlan:
        """The plan with which to start ``recipe``. Raises ``OutOfTime`` if even that is certain to
        be late."""
        prediction = self._prediction
        return prediction.fitted(
            self.whole(recipe), "plan", remaining_s, prediction.all_s, degrade=degrade
        )

    def whole(self, recipe: Recipe) -> ClipPlan:
        """The full plan of ``recipe``, within the buffers' sizes, independent of time."""
        return asked_for(recipe, self._config.max_size, self._config.max_seconds)

    def least(self, recipe: Recipe, *, degrade: bool) -> ClipPlan:
        """The minimum plan; the full plan unless ``degrade``."""
        whole = self.whole(recipe)
        return least(whole) if degrade else whole

    def end_warm_up(self) -> None:
        """Mark everything rendered so far as warm-up."""
        for times in self.times.values():
            times.end_warm_up()

    def takes_s(self, plan: ClipPlan, pace: Pace) -> float:
        """Seconds for all of ``plan`` at ``pace``."""
        return self._prediction.all_s(plan, pace)

    async def run(
        self,
        recipe: Recipe,
        plan: ClipPlan,
        lease: Lease,
        deadline_at: float,
        said: Progress,
        *,
        degrade: bool,
        keep_on: bool = False,
    ) -> Clip:
        """Render into ``lease``, which stays open, until ``deadline_at`` on ``time.monotonic``.

        With ``keep_on``, only the deadline ends it, not a prediction that it will be late.
        Raises ``Unfinished`` with the partial clip, or ``DeviceLost``. After a cancel, every stage
        has ended.
        """
        begun = time.monotonic()
        clip = Clip(lease, plan)
        order = ClipOrder(
            recipe, self.whole(recipe), deadline_at, self._config.max_seconds, degrade, keep_on
        )
        rendering = Rendering(order, clip, self.providers, self._prediction, self._runners, said)
        try:
            await rendering.run()
        except (ClipError, MemoryLimitExceeded) as error:
            raise Unfinished(clip, error) from error
        finally:
            clip.total_ms = 1000 * (time.monotonic() - begun)
        return clip
