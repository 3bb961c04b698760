"""The one terminal record of a task, with its outcome."""

from dataclasses import dataclass, field

from orchestrator.errors import TidegateError
from orchestrator.tasks.deadline import Part
from protocol import AbortCause, FinishReason, Outcome


@dataclass(frozen=True, slots=True)
class Budget:
    """A task's spent and remaining times in ms (DL-9)."""

    queue_ms: float = 0.0
    route_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    left_ms: float = 0.0

    def __str__(self) -> str:
        """The budget as text, for logs and ``X-Deadline-Budget``."""
        return (
            f"queue={self.queue_ms:.1f};route={self.route_ms:.1f};prefill={self.prefill_ms:.1f};"
            f"decode={self.decode_ms:.1f};left={self.left_ms:.1f}"
        )


@dataclass(frozen=True, slots=True)
class Ending:
    """The one terminal record of a task. ``error`` is None if the text ended well: ``met``,
    ``partial``, or ``missed`` for a part that does not stop the task.

    ``cause`` is set if the task was stopped from outside. ``tail`` is text after the last token.
    ``missed_part`` is set for ``missed`` only. ``stop`` is the stop string that ended the text,
    empty if none did.
    """

    outcome: Outcome
    finish_reason: FinishReason
    error: TidegateError | None = None
    cause: AbortCause | None = None
    budget: Budget = field(default_factory=Budget)
    tail: str = ""
    missed_part: Part | None = None
    stop: str = ""
    stop_token_id: int | None = None
    """The job's own stop token that ended the text; None if none did."""
