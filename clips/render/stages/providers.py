"""Loads the providers of the stages by their names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from clips.plan.budgets import ClipStage
from clips.plan.recipe import Chosen, RecipeError
from clips.render.settings import RenderSettings
from clips.render.stages.base import (
    CheckProvider,
    PortraitProvider,
    Provider,
    SpeechProvider,
    StageProviders,
    VideoProvider,
)
from clips.render.stages.clip import ClipCheck
from clips.render.stages.espeak import EspeakSpeech
from clips.render.stages.flux import FluxOptions, FluxPortrait
from clips.render.stages.kokoro import KokoroSpeech
from clips.render.stages.liveportrait.provider import LivePortraitVideo
from clips.render.stages.procedural import ProceduralPortrait
from clips.render.stages.tiny_clip import TinyClipCheck
from clips.render.stages.warp import WarpVideo
from worker.errors import LoadError

P = TypeVar("P", bound=Provider)

SPEECH: Mapping[str, Callable[[torch.device, RenderSettings], SpeechProvider]] = {
    "espeak": lambda device, options: EspeakSpeech(),
    "kokoro": lambda device, options: KokoroSpeech.load(device, options.kokoro.folder),
}
PORTRAIT: Mapping[str, Callable[[torch.device, RenderSettings], PortraitProvider]] = {
    "procedural": lambda device, options: ProceduralPortrait(),
    "flux": lambda device, options: FluxPortrait.load(
        device, options.flux.folder, FluxOptions(options.flux.precision)
    ),
}
VIDEO: Mapping[str, Callable[[torch.device, RenderSettings], VideoProvider]] = {
    "warp": lambda device, options: WarpVideo(),
    "liveportrait": lambda device, options: LivePortraitVideo.load(
        device, options.liveportrait.folder, options.liveportrait.precision
    ),
}
CHECK: Mapping[str, Callable[[torch.device, RenderSettings], CheckProvider]] = {
    "tiny": lambda device, options: TinyClipCheck(device),
    "clip": lambda device, options: ClipCheck(device, options.clip.folders, options.clip.precision),
}


@dataclass(frozen=True, slots=True)
class Providers:
    """Loaded providers by stage and name; a stage's first serves recipes that name none."""

    speech: Mapping[str, SpeechProvider]
    portrait: Mapping[str, PortraitProvider]
    video: Mapping[str, VideoProvider]
    check: Mapping[str, CheckProvider]

    @classmethod
    def single(cls, stages: StageProviders) -> "Providers":
        """``Providers`` with one for each stage."""
        return cls(
            {stages.speech.name: stages.speech},
            {stages.portrait.name: stages.portrait},
            {stages.video.name: stages.video},
            {stages.check.name: stages.check},
        )

    @property
    def names(self) -> Mapping[ClipStage, tuple[str, ...]]:
        """Names of the loaded providers by stage, which recipes may choose."""
        return {
            ClipStage.SPEECH: tuple(self.speech),
            ClipStage.PORTRAIT: tuple(self.portrait),
            ClipStage.VIDEO: tuple(self.video),
            ClipStage.CHECK: tuple(self.check),
        }

    def all(self) -> Sequence[Provider]:
        """All loaded providers, in the order of stages."""
        return [
            provider
            for loaded in (self.speech, self.portrait, self.video, self.check)
            for provider in loaded.values()
        ]

    def chosen(self, by: Chosen) -> StageProviders:
        """The providers that a recipe chose. Raises ``RecipeError`` for one that is not loaded."""
        return StageProviders(
            _choose(self.speech, "speech", by.speech),
            _choose(self.portrait, "portrait", by.portrait),
            _choose(self.video, "video", by.video),
            _choose(self.check, "check", by.check),
        )


def load_providers(device: torch.device, settings: RenderSettings) -> Providers:
    """Load the providers that the settings name, at least one for each stage. Raises
    ``LoadError``."""
    _check_names("SPEECH", settings.speech, SPEECH)
    _check_names("PORTRAIT", settings.portrait, PORTRAIT)
    _check_names("VIDEO", settings.video, VIDEO)
    _check_names("CHECK", settings.check, CHECK)
    return Providers(
        {name: SPEECH[name](device, settings) for name in settings.speech},
        {name: PORTRAIT[name](device, settings) for name in settings.portrait},
        {name: VIDEO[name](device, settings) for name in settings.video},
        {name: CHECK[name](device, settings) for name in settings.check},
    )


def _check_names(setting: str, names: Sequence[str], known: Mapping[str, object]) -> None:
    there = ", ".join(known)
    if not names:
        raise LoadError(f"TIDEGATE_SLOT__{setting} names no provider; available: {there}")
    for name in names:
        if name not in known:
            raise LoadError(f"TIDEGATE_SLOT__{setting}: no provider {name!r}; available: {there}")


def _choose(loaded: Mapping[str, P], field: str, name: str) -> P:
    if not name:
        return next(iter(loaded.values()))
    if name not in loaded:
        there = ", ".join(loaded)
        raise RecipeError(f"providers.{field}", f"{name!r} is not loaded here; available: {there}")
    return loaded[name]
