"""Checks whether the picture shows what was asked for: two models, five keyframes (SL-7). It marks
a clip and never fails one."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from clips.render.stages.base import ModelScore

KEYFRAMES = 5
WEIGHTS = (0.4, 0.6)
THRESHOLDS = (0.70, 0.72)
OUTLIER = 0.15
"""A keyframe whose score is further than this below its model's mean is an outlier."""


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
