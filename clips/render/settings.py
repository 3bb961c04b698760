"""Settings of the slot model, read once from the environment (``TIDEGATE_SLOT__…``)."""

from typing import Literal

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from clips.plan.plan import BUFFER_S
from clips.render.stages.checkpoint import Precision
from clips.render.stages.flux import FluxPrecision
from worker.environment import DELIMITER, EnvironmentSettings, Names, Section, read_environment


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

    folders: Names = ()
    """Folders with the weights of two models, with a comma between: first the one of weight 0.4,
    then the one of weight 0.6."""
    precision: Precision = "fp16"
    """Precision of both models."""


class ClipMemorySettings(Section):
    """Limits of the device's memory (SL-3)."""

    hard_gib: float = Field(default=10.71, ge=0)
    """GiB of memory above which the clip that asks for more is ended; from 96 % of it on one
    warning is logged. 0: no limit."""


class RenderSettings(EnvironmentSettings):
    """Settings of the slot model: its providers, sizes, number of slots and memory."""

    model_config = SettingsConfigDict(
        env_prefix="TIDEGATE_SLOT__", env_nested_delimiter=DELIMITER, frozen=True, extra="forbid"
    )

    device: Literal["cuda", "cpu"] = "cuda"
    """Device of the pipeline. It never falls back: ``cpu`` must be asked for by name (WK-2)."""
    speech: str = "espeak"
    """Provider of speech (docs/slot.md)."""
    portrait: str = "procedural"
    """Provider of portraits."""
    video: str = "warp"
    """Provider of video."""
    check: str = "tiny"
    """Provider of the check whether a clip fits its recipe."""
    size: int = Field(default=256, ge=64, le=1024, multiple_of=32)
    """Most pixels of either side of a clip."""
    seconds: float = Field(default=20.0, gt=0, le=45)
    """Most seconds of a clip."""
    slots: int = Field(default=2, ge=1, le=64)
    """Clips rendered at once, each with its own buffers; one's speech overlaps another's video."""
    buffer_s: float = Field(default=BUFFER_S, ge=0)
    """Seconds of each deadline kept back for what comes after the pipeline (SL-2)."""

    memory: ClipMemorySettings = ClipMemorySettings()
    kokoro: KokoroSettings = KokoroSettings()
    flux: FluxSettings = FluxSettings()
    liveportrait: LivePortraitSettings = LivePortraitSettings()
    clip: ClipSettings = ClipSettings()


def read_clip_settings() -> RenderSettings:
    """Read the environment. Raises ``ValueError`` that names each variable which is wrong."""
    return read_environment(RenderSettings, "the slot's settings")
