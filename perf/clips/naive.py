"""The clip pipeline that a user would write in an afternoon: the same four providers one after the
other, fresh tensors for every clip, a clone between stages, no clock."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import torch

from clips.plan.budgets import Stage
from clips.plan.plan import SAMPLE_RATE, ClipPlan
from clips.plan.recipe import Recipe
from clips.render import encode
from clips.render.check import CheckResult, judge, keyframes_of
from clips.render.stages.base import Stages
from clips.render.stages.providers import load_stages


def development_stages() -> Stages:
    """Stages that the slot model serves with unless it is told otherwise."""
    return load_stages(
        torch.device("cpu"), speech="espeak", portrait="procedural", video="warp", check="tiny"
    )


@dataclass(slots=True)
class NaiveClip:
    """A clip made naively. ``stage_ms``: by stage, and ``total``, encoding included."""

    plan: ClipPlan
    mp4: bytes = b""
    check: CheckResult | None = None
    stage_ms: dict[str, float] = field(default_factory=dict)

    def facts(self) -> dict[str, Any]:
        """Facts of the clip, as the slot model's result has them."""
        return {
            "event": "result",
            "seconds": self.plan.seconds,
            "frames": self.plan.frames,
            "fps": self.plan.fps,
            "size": self.plan.size,
            "given_up": [],
            **{f"{stage}_ms": ms for stage, ms in self.stage_ms.items()},
        }


class NaivePipeline:
    """Renders on the thread that asks. ``max_…`` as in the slot model's settings. Threads may share
    one: only speech waits for its turn, since eSpeak says one thing at a time."""

    def __init__(self, stages: Stages, max_size: int, max_seconds: float) -> None:
        self._stages = stages
        self._speech_turn = threading.Lock()
        self._max_size = max_size
        self._max_seconds = max_seconds

    def render(self, recipe: Recipe, *, encoded: bool = True) -> NaiveClip:
        begun = time.monotonic()
        stages, check = self._stages, None
        size = min(recipe.video.size or self._max_size, self._max_size)
        seconds = min(recipe.video.seconds, self._max_seconds)
        stage_ms: dict[str, float] = {}

        def done(stage: str, since: float) -> float:
            now = time.monotonic()
            stage_ms[stage] = 1000 * (now - since)
            return now

        with torch.inference_mode():
            audio = torch.zeros(round(seconds * SAMPLE_RATE))
            with self._speech_turn:
                samples = stages.speech.render(recipe, audio, _go_on)
            audio = audio[:samples].clone()
            at = done(Stage.SPEECH, begun)

            actor = torch.zeros(3, size, size)
            stages.portrait.render(recipe, actor, _go_on)
            actor = actor.clone()
            at = done(Stage.PORTRAIT, at)

            plan = ClipPlan(samples / SAMPLE_RATE, recipe.video.fps, size, recipe.check.enabled)
            video = torch.zeros(plan.frames, 3, size, size, dtype=torch.uint8)
            stages.video.render(plan, actor, audio, video, _go_on)
            video = video.clone()
            at = done(Stage.VIDEO, at)

            if recipe.check.enabled:
                keyframes = video[keyframes_of(plan.frames)].clone()
                prompt = recipe.portrait.prompt
                check = judge(stages.check.score(prompt, keyframes, _go_on))
                done(Stage.CHECK, at)
            mp4 = encode.mp4(video, audio, plan.fps) if encoded else b""
        done("total", begun)
        return NaiveClip(plan, mp4, check, stage_ms)


def _go_on(_: float) -> None:
    """Progress callback that does nothing."""
