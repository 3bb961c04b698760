"""A request for a clip, the clip during rendering, and its check: two models score five keyframes
(SL-7). A check marks a clip, but never fails it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch

from clips.plan.budgets import ClipStage
from clips.plan.plan import SAMPLE_RATE, ClipPlan
from clips.plan.recipe import Recipe
from clips.render.buffers import Lease
from clips.render.stages.base import ModelScore

KEYFRAMES = 5
WEIGHTS = (0.4, 0.6)
THRESHOLDS = (0.70, 0.72)
OUTLIER = 0.15
"""A keyframe is an outlier if its score is more than this below its model's mean."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of a check. ``score``: of both models, weighted. ``outliers``: keyframes, from 0."""

    score: float
    models: tuple[ModelScore, ...]
    outliers: tuple[int, ...]
    passed: bool


def keyframes_of(frames: int) -> list[int]:
    """Indices of at most ``KEYFRAMES`` frames, spread over all of them."""
    count = min(KEYFRAMES, frames)
    return [round(n * (frames - 1) / max(1, count - 1)) for n in range(count)]


def judge(models: Sequence[ModelScore]) -> CheckResult:
    """Judge a clip: passed when each model's mean reaches its threshold and there is no outlier."""
    means = [fmean(model.scores) for model in models]
    outliers = {
        number
        for model, mean in zip(models, means, strict=True)
        for number, score in enumerate(model.scores)
        if mean - score > OUTLIER
    }
    reached = all(mean >= least for mean, least in zip(means, THRESHOLDS, strict=True))
    return CheckResult(
        score=sum(weight * mean for weight, mean in zip(WEIGHTS, means, strict=True)),
        models=tuple(models),
        outliers=tuple(sorted(outliers)),
        passed=reached and not outliers,
    )


@dataclass(frozen=True, slots=True)
class ClipOrder:
    """A request for a clip. ``deadline_at`` is on ``time.monotonic``."""

    recipe: Recipe
    deadline_at: float
    degrade: bool = False
    """Whether parts may be dropped to be in time."""
    keep_on: bool = False
    """Whether only its deadline stops it, not a prediction that it will be late."""
    outputs: tuple[str, ...] = ()

    @property
    def left_s(self) -> float:
        return self.deadline_at - time.monotonic()


@dataclass(slots=True)
class Clip:
    """The rendered part of a clip: views of its lease's buffers, valid until the lease closes."""

    lease: Lease
    plan: ClipPlan
    samples: int = 0
    frames: int = 0
    portrait_size: int = 0
    """Pixels of either side of the portrait; 0 while there is none."""
    check: CheckResult | None = None
    has_failed_check: bool = False
    spared: bool = False
    """Whether the clip was certain to be late at some point, but continued."""
    stage_ms: dict[ClipStage, float] = field(default_factory=dict)
    total_ms: float = 0.0

    @property
    def given_up(self) -> tuple[str, ...]:
        """What was dropped, in words."""
        failed = ("the check failed",) if self.has_failed_check else ()
        return (*self.plan.given_up, *failed)

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

    def facts(self, *, is_met: bool) -> dict[str, object]:
        """The facts for the client's last answer."""
        return {
            "seconds": round(self.samples / SAMPLE_RATE, 3),
            "frames": self.frames,
            "fps": self.plan.fps,
            "size": self.plan.size,
            "given_up": self.given_up,
            "check": self.check,
            "deadline_met": is_met,
            **{f"{stage}_ms": round(self.stage_ms.get(stage, 0.0), 1) for stage in ClipStage},
            "total_ms": round(self.total_ms, 1),
        }


class Unfinished(Exception):
    """A clip was not finished: ``clip`` is the partial clip, with an open lease."""

    def __init__(self, clip: Clip, reason: Exception) -> None:
        super().__init__(str(reason))
        self.clip = clip
        self.reason = reason
