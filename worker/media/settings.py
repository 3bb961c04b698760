"""Settings of the slot model, read once from the environment (``TIDEGATE_SLOT_…``)."""

from dataclasses import fields
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field
from pydantic_settings import NoDecode, SettingsConfigDict

from worker.environment import EnvironmentSettings, read_environment
from worker.media.stages.checkpoint import Precision
from worker.media.stages.flux import FluxPrecision, TextPlace
from worker.media.stages.options import ModelOptions
from worker.protocol.clips.plan import BUFFER_S


def _by_commas(value: object) -> object:
    if isinstance(value, str):
        return tuple(dict.fromkeys(filter(None, (each.strip() for each in value.split(",")))))
    return value


Names = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_by_commas)]
"""Names, separated by commas in the environment."""


class SlotSettings(EnvironmentSettings):
    """Settings of the slot model: its providers, sizes, number of slots and memory."""

    model_config = SettingsConfigDict(env_prefix="TIDEGATE_SLOT_", frozen=True, extra="forbid")

    device: Literal["cuda", "cpu"] = "cuda"
    """Device of the pipeline. It never falls back: ``cpu`` must be asked for by name (WK-2)."""
    speech: Names = ("espeak",)
    portrait: Names = ("procedural",)
    video: Names = ("warp",)
    check: Names = ("tiny",)
    """Providers of the stages (``worker.media.stages.providers``), all of which stay in memory:
    recipes choose among them, and the first serves those that do not."""
    kokoro_folder: str = ""
    """Folder with the weights of the speech provider ``kokoro``."""
    flux_folder: str = ""
    """Folder with the weights of the portrait provider ``flux``."""
    flux_precision: FluxPrecision = "nf4"
    """Precision of flux's transformer."""
    flux_text: TextPlace = "offload"
    """Place of flux's text encoders: in host memory, passing through the device layer by layer
    (``offload``), on the device (``resident``), or on the ``cpu``, where they run."""
    liveportrait_folder: str = ""
    """Folder with the weights of the video provider ``liveportrait``."""
    liveportrait_precision: Precision = "fp16"
    clip_folders: Names = ()
    """Folders with the weights of the check ``clip``: two, separated by a comma."""
    clip_precision: Precision = "fp16"
    size: int = Field(default=256, ge=64, le=1024, multiple_of=32)
    """Most pixels of either side of a clip."""
    seconds: float = Field(default=20.0, gt=0, le=45)
    """Most seconds of a clip."""
    slots: int = Field(default=2, ge=1, le=64)
    """Clips under way at once, each with its own buffers: one's speech overlaps another's video."""
    max_waiting: int = Field(default=64, ge=0)
    """Clips that may wait for one of the ``slots`` before new ones are refused."""
    buffer_s: float = Field(default=BUFFER_S, ge=0)
    """Seconds of each deadline kept back for what comes after the pipeline (SL-2)."""
    warm_up: bool = True
    """Render a short clip by each provider before the first request."""
    default_deadline_s: float = Field(default=45.0, gt=0)
    memory_soft_gb: float = Field(default=11.0, ge=0)
    """GB of memory above which one warning is logged; 0: never."""
    memory_hard_gb: float = Field(default=11.5, ge=0)
    """GB of memory above which the clip that asks for more is ended; 0: no limit."""
    cpu_threads: int = Field(default=0, ge=0)
    """Threads of a stage on the CPU; 0: torch's own choice."""
    nice: int = Field(default=10, ge=0, le=19)
    """Niceness of threads that render on the CPU, or encode, so that text goes first; 0: none."""
    legacy_stub: bool = False
    """Whether Triton's stub was built for numpy 1 (the wheel's is; ``worker.service.stub_abi``)."""

    @property
    def models(self) -> ModelOptions:
        """Model options of every provider, chosen or not."""
        names = [each.name for each in fields(ModelOptions)]
        return ModelOptions(**{name: getattr(self, name) for name in names})


def read_slot_settings() -> SlotSettings:
    """Read the environment. Raises ``ValueError`` that names each variable which is wrong."""
    return read_environment(SlotSettings, "the slot's settings", {})
