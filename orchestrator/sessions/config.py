"""Settings of sessions."""

from typing import Annotated, Final

from pydantic import Field

from worker.environment import HIDDEN, Section

MAX_IDLE_KEEP_S: Final = 600.0
"""Longest ``idle_keep_s`` in seconds that a client may ask for."""
MAX_PER_KEY: Final = 1000
"""Most sessions that one key may have."""


class SessionConfig(Section):
    """Conversations that the service keeps between their turns (WK-9)."""

    idle_keep_s: float = Field(default=30.0, ge=0)
    """How long a conversation's KV is kept for its next turn, for requests with a ``session_id``
    that do not say (``idle_keep_s``). ``TIDEGATE_WORKER__KV__SESSION_SHARE`` bounds how much is
    kept; running jobs get the blocks when no others are left."""
    ttl_s: float = Field(default=3600.0, gt=0)
    """How long a session (``/v2/sessions``) is kept without a turn."""
    max_bytes: Annotated[int, HIDDEN] = Field(default=2**20, ge=1024)
    """Bound on the text of one session."""
    all_bytes: int = Field(default=256 * 2**20, ge=1024)
    """Bound on the text of all sessions together."""
