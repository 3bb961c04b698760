"""What a stage's provider does: plain code on a thread of its own that asks, in every step, whether
to go on.

A provider loads its model when it is made, keeps it, and renders into views that it is given. It
serves one slot at a time.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from worker.media.memory import Resident
from worker.media.plan import ClipPlan
from worker.media.recipe import Recipe

Step = Callable[[float], None]
"""Called in each denoising step and frame batch with the share that is done, 0 to 1. Raises what
ends the stage: it must get through."""


class Provider(Protocol):
    """What providers of every stage have."""

    name: str

    def residents(self) -> Sequence[Resident]:
        """What it keeps in memory."""

    def close(self) -> None:
        """Free it."""


class SpeechProvider(Provider, Protocol):
    """Text → sound."""

    def render(self, recipe: Recipe, audio: torch.Tensor, step: Step) -> int:
        """Write samples at ``SAMPLE_RATE`` to the front of ``audio``, ``[samples]`` float32;
        returns how many. What does not fit is left out."""


class PortraitProvider(Provider, Protocol):
    """Prompt → face."""

    def render(self, recipe: Recipe, actor: torch.Tensor, step: Step) -> None:
        """Write all of ``actor``, ``[3, size, size]`` float32 from 0 to 1."""


class VideoProvider(Provider, Protocol):
    """Face and sound → frames."""

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
    """How like its prompt each keyframe is to one model, 0 to 1."""

    model: str
    scores: tuple[float, ...]


class CheckProvider(Provider, Protocol):
    """Keyframes and prompt → how well they go together, by two models."""

    def score(
        self, prompt: str, keyframes: torch.Tensor, step: Step
    ) -> tuple[ModelScore, ModelScore]:
        """``keyframes``: ``[n, 3, size, size]`` uint8."""


@dataclass(frozen=True, slots=True)
class Stages:
    """One provider for each stage."""

    speech: SpeechProvider
    portrait: PortraitProvider
    video: VideoProvider
    check: CheckProvider

    def all(self) -> tuple[Provider, ...]:
        return (self.speech, self.portrait, self.video, self.check)
