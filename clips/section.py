"""The room's settings in the orchestrator."""

from typing import ClassVar

from orchestrator.settings.rooms import RoomSection


class ClipsSection(RoomSection):
    """Clips, which the slot model renders (docs/slot.md)."""

    table: ClassVar = "slots"

    serve: bool = False
    """Whether instances are asked for the slot model, and ``/v2/slots`` is served. ``tidegate up
    --slot`` sets it."""
