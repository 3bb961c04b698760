"""The room's settings."""

from typing import ClassVar

from pydantic import Field

from orchestrator.retention import Retention
from orchestrator.settings.room_section import RoomSection


class ResponseSection(RoomSection):
    """Answers of ``/v1/responses``, whose clients go on from an earlier answer by its id."""

    table: ClassVar = "responses"

    keep_s: float = Field(default=3600.0, ge=0)
    """How long an answer is kept; 0: not at all."""
    keep_bytes: int = Field(default=64 * 2**20, ge=0)
    """Bound on the conversations of all kept answers. One takes what its text does, with each of
    its answers; 0: none are kept."""

    @property
    def retention(self) -> Retention:
        """Bounds on what is kept, in number too."""
        return Retention(keep_count=1000, keep_s=self.keep_s, keep_bytes=self.keep_bytes)
