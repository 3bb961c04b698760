"""The interface of a stage's provider: plain code on its own thread that asks in every step whether
to continue. A provider loads its model at construction, keeps it, and renders into given views. It
serves one clip at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from clips.plan.budgets import ClipStage
from clips.plan.plan import ClipPlan
from clips.plan.recipe import Recipe
from clips.render.memory import Resident

Step = Callable[[float], None]
"""Called in each denoising step and frame batch with the share that is done, 0 to 1. Raises what
ends the stage, which the provider must let through."""


class Provider(Protocol):
    """The part of the interface that providers of every stage have. One that keeps nothing in
    memory takes these answers."""

    name: str

    def residents(self) -> Sequence[Resident]:
        """What the provider keeps in memory."""
        return ()

    def close(self) -> None:
        """Free that memory."""
        return


class SpeechProvider(Provider, Protocol):
    """Makes sound of text."""

    def render(self, recipe: Recipe, audio: torch.Tensor, step: Step) -> int:
        """Write samples at ``SAMPLE_RATE`` to the front of ``audio``, ``[samples]`` float32;
        returns how many. What does not fit is left out."""


class PortraitProvider(Provider, Protocol):
    """Makes a face of a prompt."""

    def render(self, recipe: Recipe, actor: torch.Tensor, step: Step) -> None:
        """Write all of ``actor``, ``[3, size, size]`` float32 from 0 to 1."""


class VideoProvider(Provider, Protocol):
    """Makes frames of a face and sound."""

    def render(
        self,
        plan: ClipPlan,
        actor: torch.Tensor,
        audio: torch.Tensor,
        video: torch.Tensor,
        step: Step,
    ) -> None:
        """Write all of ``video``, ``[frames, 3, size, size]`` uint8; frame ``n`` shows what
        ``audio`` says from ``n / fps`` seconds on."""


@dataclass(frozen=True, slots=True)
class ModelScore:
    """How well each keyframe matches its prompt, 0 to 1, according to one model."""

    model: str
    scores: tuple[float, ...]


class CheckProvider(Provider, Protocol):
    """Judges by two models how well keyframes match a prompt."""

    def score(
        self, prompt: str, keyframes: torch.Tensor, step: Step
    ) -> tuple[ModelScore, ModelScore]:
        """Score ``keyframes`` ``[n, 3, size, size]`` uint8."""


class StageProviders(NamedTuple):
    """One provider for each stage, in the order of ``ClipStage``."""

    speech: SpeechProvider
    portrait: PortraitProvider
    video: VideoProvider
    check: CheckProvider

    def by_stage(self) -> dict[ClipStage, Provider]:
        return dict(zip(ClipStage, self, strict=True))
