"""The request that a client makes when it submits a clip."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from clips.plan.recipe import Recipe
from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.job import OnDisconnect
from orchestrator.telemetry.trace_context import TraceContext

MODEL: Final = "slot"
"""Triton's name of the model."""


class OutputKind(NamedTuple):
    """A kind of output file of a clip."""

    file: str
    content_type: str


OUTPUTS: Final[Mapping[str, OutputKind]] = {
    "mp4": OutputKind("clip.mp4", "video/mp4"),
    "wav": OutputKind("speech.wav", "audio/wav"),
    "png": OutputKind("portrait.png", "image/png"),
}
"""Kinds of output files by the name of the model's output tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipJob:
    """A submitted clip. ``recipe_json`` is unchanged: a newer worker may know more fields."""

    recipe: Recipe
    recipe_json: bytes
    deadline: Deadline
    correlation_id: str
    arrived: float
    """When the request's headers were read, in seconds of the clock."""
    outputs: tuple[str, ...] = ("mp4",)
    degrade: bool = False
    """Whether parts may be dropped to be in time."""
    on_disconnect: OnDisconnect = OnDisconnect.CONTINUE
    key: str = ""
    """Fingerprint of the client's token."""
    trace: TraceContext | None = None
