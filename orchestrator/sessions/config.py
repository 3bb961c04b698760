"""Settings of sessions."""

from typing import Final

from pydantic import Field

from worker.environment import Section

MAX_IDLE_KEEP_S: Final = 600.0
"""Longest ``idle_keep_s`` in seconds that a client may ask for."""
MAX_PER_KEY: Final = 1000
"""Most sessions that one key may have."""

SESSION_TTL_S: Final = 3600.0
"""Seconds for which a session (``/v2/sessions``) is kept without a turn."""
SESSION_BYTES: Final = 2**20
"""Bound on the text of one session."""
ALL_SESSIONS_BYTES: Final = 256 * 2**20
"""Bound on the text of all sessions together."""


class SessionConfig(Section):
    """Conversations that the service keeps between their turns (WK-9)."""

    idle_keep_s: float = Field(default=30.0, ge=0)
    """How long a conversation's KV is kept for its next turn, for requests with a ``session_id``
    that do not say (``idle_keep_s``). ``TIDEGATE_WORKER__KV__SESSION_SHARE`` bounds how much is
    kept; running jobs get the blocks when no others are left."""
