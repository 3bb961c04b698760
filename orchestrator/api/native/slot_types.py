"""The body of a submission to ``/v2/slots``."""

from typing import Literal

import msgspec

from orchestrator.tasks.job import OnDisconnect


class SlotRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``recipe`` is read by the worker's own rules (docs/slot.md)."""

    recipe: msgspec.Raw
    model: str = "slot"
    deadline_ms: float | None = None
    on_deadline: Literal["error", "degrade"] = "error"
    on_disconnect: OnDisconnect = OnDisconnect.CONTINUE
    outputs: tuple[Literal["mp4", "wav", "png"], ...] = ("mp4",)
    preview: bool = False
