"""What an operator gives to sessions."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SessionConfig:
    """Seconds and bytes."""

    idle_keep_s: float = 30.0
    """How long a conversation's KV is kept between two turns where the client does not say."""
    max_idle_keep_s: float = 600.0
    ttl_s: float = 3600.0
    """A session without a turn for so long is forgotten."""
    per_key: int = 1000
    session_bytes: int = 2**20
    """What one conversation may take."""
    all_bytes: int = 256 * 2**20
    """And all of them together."""
