"""The room's settings, and the bounds that no setting moves."""

from typing import Annotated, ClassVar, Final

from pydantic import Field

from orchestrator.settings.room_section import RoomSection
from worker.environment import HIDDEN

MAX_PER_KEY: Final = 1000
"""Most sessions that one key may have."""


class SessionSection(RoomSection):
    """Conversations that the service keeps between their turns (WK-9)."""

    table: ClassVar = "sessions"

    ttl_s: float = Field(default=3600.0, gt=0)
    """How long a session (``/v2/sessions``) is kept without a turn."""
    max_bytes: Annotated[int, HIDDEN] = Field(default=2**20, ge=1024)
    """Bound on the text of one session."""
    all_bytes: int = Field(default=256 * 2**20, ge=1024)
    """Bound on the text of all sessions together."""
