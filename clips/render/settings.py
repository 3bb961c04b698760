"""Settings of the slot model, read once from the environment (``TIDEGATE_SLOT__…``)."""

from dataclasses import dataclass
from typing import Literal

from pydantic import ConfigDict, Field
from pydantic_settings import SettingsConfigDict

from clips.plan.plan import BUFFER_S
from clips.render.stages.checkpoint import Precision
from clips.render.stages.flux import FluxPrecision
from worker.environment import DELIMITER, EnvironmentSettings, Names, Section, read_environment


@dataclass(frozen=True)
class Folders:
    """Folders with providers' weights."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    kokoro: str = ""
    flux: str = ""
    liveportrait: str = ""
    clip: Names = ()


@dataclass(frozen=True)
class Precisions:
    """Precisions of providers' weights."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    flux: FluxPrecision = "nf4"
    liveportrait: Precision = "fp16"
    clip: Precision = "fp16"


class ClipMemorySettings(Section):
    """Limits of the device's memory (SL-3)."""

    hard_gib: float = Field(default=10.71, ge=0)
    """Memory limit in GiB; a clip that would exceed it is ended. At 96 % of it, one warning is
    logged. 0: no limit."""


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
    """Maximum pixels of either side of a clip."""
    seconds: float = Field(default=20.0, gt=0, le=45)
    """Maximum seconds of a clip."""
    slots: int = Field(default=2, ge=1, le=64)
    """Clips rendered at once, each with its own buffers; one's speech overlaps another's video."""
    buffer_s: float = Field(default=BUFFER_S, ge=0)
    """Seconds of each deadline reserved for the steps after the pipeline (SL-2)."""

    folders: Folders = Folders()
    """Folders with the weights of ``kokoro``, ``flux``, ``liveportrait`` and ``clip``, as JSON:
    ``{"flux": "/weights/flux"}``. Two for ``clip``, with a comma between: first the model of weight
    0.4, then that of weight 0.6."""
    precisions: Precisions = Precisions()
    """Precision of each model, as JSON: of FLUX's transformer (``nf4``, ``fp8``, ``bf16``,
    ``fp32``), of LivePortrait's networks but its keypoints, and of both CLIP models (``fp16``,
    ``bf16``, ``fp32``) (SL-3)."""
    memory: ClipMemorySettings = ClipMemorySettings()


def read_clip_settings() -> RenderSettings:
    """Read the environment. Raises ``ValueError`` that names each variable which is wrong."""
    return read_environment(RenderSettings, "the slot's settings")
