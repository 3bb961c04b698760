"""Loads the providers of the stages by their names."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import torch

from clips.render.settings import RenderSettings
from clips.render.stages.base import (
    CheckProvider,
    PortraitProvider,
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

P = TypeVar("P")

SPEECH: Mapping[str, Callable[[torch.device, RenderSettings], SpeechProvider]] = {
    "espeak": lambda device, options: EspeakSpeech(),
    "kokoro": lambda device, options: KokoroSpeech.load(device, options.folders.kokoro),
}
PORTRAIT: Mapping[str, Callable[[torch.device, RenderSettings], PortraitProvider]] = {
    "procedural": lambda device, options: ProceduralPortrait(),
    "flux": lambda device, options: FluxPortrait.load(
        device, options.folders.flux, FluxOptions(options.precisions.flux)
    ),
}
VIDEO: Mapping[str, Callable[[torch.device, RenderSettings], VideoProvider]] = {
    "warp": lambda device, options: WarpVideo(),
    "liveportrait": lambda device, options: LivePortraitVideo.load(
        device, options.folders.liveportrait, options.precisions.liveportrait
    ),
}
CHECK: Mapping[str, Callable[[torch.device, RenderSettings], CheckProvider]] = {
    "tiny": lambda device, options: TinyClipCheck(device),
    "clip": lambda device, options: ClipCheck(
        device, options.folders.clip, options.precisions.clip
    ),
}


def load_providers(device: torch.device, settings: RenderSettings) -> StageProviders:
    """Load the providers that the settings name. Raises ``LoadError``."""
    speech = _named("SPEECH", settings.speech, SPEECH)
    portrait = _named("PORTRAIT", settings.portrait, PORTRAIT)
    video = _named("VIDEO", settings.video, VIDEO)
    check = _named("CHECK", settings.check, CHECK)
    return StageProviders(
        speech(device, settings),
        portrait(device, settings),
        video(device, settings),
        check(device, settings),
    )


def _named(setting: str, name: str, known: Mapping[str, P]) -> P:
    if name not in known:
        there = ", ".join(known)
        raise LoadError(f"TIDEGATE_SLOT__{setting}: no provider {name!r}; available: {there}")
    return known[name]
