"""Metrics of sessions."""

from orchestrator.sessions.store import SessionStore
from orchestrator.telemetry.metrics import Row

SESSIONS: tuple[Row[SessionStore], ...] = (
    Row("gauge", "sessions", "sessions", "Sessions that there are (WK-9)", len),
    Row(
        "gauge",
        "sessions_bytes",
        "bytes",
        "What their histories take",
        lambda store: store.total_bytes,
    ),
    Row(
        "counter",
        "session_turns",
        "turns",
        "Turns that were submitted: kept in the history, or dropped since they did not end well",
        lambda store: (((what,), store.turns[what]) for what in ("kept", "dropped")),
        ("what",),
    ),
    Row(
        "counter",
        "sessions_ended",
        "sessions",
        "Sessions that are gone, by why",
        lambda store: (((why,), store.ended[why]) for why in ("deleted", "expired")),
        ("why",),
    ),
)
