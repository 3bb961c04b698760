"""What is promised of durable tasks, whatever they are kept in."""

from dataclasses import dataclass
from typing import Final

KEEP_OUTCOMES_S: Final = 7 * 86_400.0
"""Seconds for which a durable task's outcome and ``Idempotency-Key`` are kept after its end
(OR-5)."""


@dataclass(frozen=True, slots=True)
class JournalTerms:
    """How much of a durable task may be lost, and what is kept of it for how long."""

    window_ms: float = 0.0
    """How much may be lost with the process, in ms; 0: a task is stored before its 202."""
    keep_results_s: float = 86_400.0
    """How long a task's text is kept after its end, in seconds."""
    keep_s: float = KEEP_OUTCOMES_S
    """How long a task's outcome and ``Idempotency-Key`` are kept after its end, in seconds."""
