"""Settings of sessions."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """Bounds of sessions, in seconds and bytes."""

    idle_keep_s: float = 30.0
    """How long a conversation's KV is kept between two turns where the client does not say."""
    max_idle_keep_s: float = 600.0
    ttl_s: float = 3600.0
    """How long a session is kept without a turn."""
    per_key: int = 1000
    session_bytes: int = 2**20
    """Most bytes of one conversation."""
    all_bytes: int = 256 * 2**20
    """Most bytes of all conversations together."""
