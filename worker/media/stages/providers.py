"""Providers by name."""

from collections.abc import Callable, Mapping

import torch

from worker.errors import LoadError
from worker.media.stages.base import (
    CheckProvider,
    PortraitProvider,
    SpeechProvider,
    Stages,
    VideoProvider,
)
from worker.media.stages.espeak import EspeakSpeech
from worker.media.stages.procedural import ProceduralPortrait
from worker.media.stages.tiny_clip import TinyClipCheck
from worker.media.stages.warp import WarpVideo

SPEECH: Mapping[str, Callable[[torch.device], SpeechProvider]] = {
    "espeak": lambda device: EspeakSpeech()
}
PORTRAIT: Mapping[str, Callable[[torch.device], PortraitProvider]] = {
    "procedural": lambda device: ProceduralPortrait()
}
VIDEO: Mapping[str, Callable[[torch.device], VideoProvider]] = {"warp": lambda device: WarpVideo()}
CHECK: Mapping[str, Callable[[torch.device], CheckProvider]] = {"tiny": TinyClipCheck}


def load_stages(
    device: torch.device, *, speech: str, portrait: str, video: str, check: str
) -> Stages:
    """Load one provider for each stage. Raises ``LoadError``."""
    for name, there, setting in (
        (speech, SPEECH, "SPEECH"),
        (portrait, PORTRAIT, "PORTRAIT"),
        (video, VIDEO, "VIDEO"),
        (check, CHECK, "CHECK"),
    ):
        if name not in there:
            known = ", ".join(there)
            raise LoadError(f"TIDEGATE_SLOT_{setting}: no provider {name!r}; there is: {known}")
    return Stages(
        SPEECH[speech](device),
        PORTRAIT[portrait](device),
        VIDEO[video](device),
        CHECK[check](device),
    )
