"""Where the weights of providers lie and in which precision they are kept; one field for each
setting ``TIDEGATE_SLOT_…`` of the same name."""

from dataclasses import dataclass

from worker.media.stages.checkpoint import Precision
from worker.media.stages.flux import FluxPrecision, TextPlace


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Folders are local; "" is none."""

    kokoro_folder: str = ""
    flux_folder: str = ""
    flux_precision: FluxPrecision = "nf4"
    flux_text: TextPlace = "offload"
    liveportrait_folder: str = ""
    liveportrait_precision: Precision = "fp16"
    clip_folders: tuple[str, ...] = ()
    """Two: the model that weighs 0.4 and the one that weighs 0.6."""
    clip_precision: Precision = "fp16"


DEFAULT_OPTIONS = ModelOptions()
"""No folders: enough for providers without weights."""
