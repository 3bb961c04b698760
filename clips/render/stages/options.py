"""Folders and precisions of providers' weights: the sections of the slot model's settings that are
named like providers."""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import AfterValidator

from clips.render.stages.checkpoint import Precision
from clips.render.stages.flux import FluxPrecision
from worker.environment import Names, Section


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


DistinctNames = Annotated[Names, AfterValidator(_distinct)]
"""Names, each counted once."""


class KokoroSettings(Section):
    """The speech provider of that name."""

    folder: str = ""
    """Folder with its weights; empty for none."""


class FluxSettings(Section):
    """The portrait provider of that name."""

    folder: str = ""
    """Folder with its weights; empty for none."""
    precision: FluxPrecision = "nf4"
    """Precision of its transformer."""


class LivePortraitSettings(Section):
    """The video provider of that name."""

    folder: str = ""
    """Folder with its weights; empty for none."""
    precision: Precision = "fp16"
    """Precision of its networks, keypoints aside."""


class ClipSettings(Section):
    """The check of that name."""

    folders: DistinctNames = ()
    """Folders with the weights of two models, with a comma between: first the one of weight 0.4,
    then the one of weight 0.6."""
    precision: Precision = "fp16"
    """Precision of both models."""


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Options of every provider with weights."""

    kokoro: KokoroSettings = field(default_factory=KokoroSettings)
    flux: FluxSettings = field(default_factory=FluxSettings)
    liveportrait: LivePortraitSettings = field(default_factory=LivePortraitSettings)
    clip: ClipSettings = field(default_factory=ClipSettings)


DEFAULT_OPTIONS = ModelOptions()
"""Options without folders, enough for providers without weights."""
