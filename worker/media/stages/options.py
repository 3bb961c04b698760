"""Folders and precisions of providers' weights; one field for each setting ``TIDEGATE_SLOT_…`` of
the same name."""

from dataclasses import dataclass

from worker.media.stages.checkpoint import Precision
from worker.media.stages.flux import FluxPrecision, TextPlace


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """Folders and precisions of providers' weights. Folders are local; "" is none."""

    kokoro_folder: str = ""
    flux_folder: str = ""
    flux_precision: FluxPrecision = "nf4"
    flux_text: TextPlace = "offload"
    liveportrait_folder: str = ""
    liveportrait_precision: Precision = "fp16"
    clip_folders: tuple[str, ...] = ()
    """Two folders: the model that weighs 0.4, then the one that weighs 0.6."""
    clip_precision: Precision = "fp16"


DEFAULT_OPTIONS = ModelOptions()
"""Options without folders, enough for providers without weights."""
