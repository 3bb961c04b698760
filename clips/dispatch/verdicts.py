"""Decides a clip's ending, and what a worker's error means for its client: pure."""

from clips.dispatch.task import ClipTask
from orchestrator.errors import (
    DeadlineExceeded,
    Draining,
    EngineError,
    InstanceLost,
    InvalidRequest,
    NoCapacity,
)
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.verdicts import failed, refused
from orchestrator.tasks.work import Stage
from protocol import Code, FinishReason, Outcome

TO_BE_SENT_AGAIN = (Code.NO_CAPACITY, Code.DRAINING, Code.CANCELLED, Code.INSTANCE_LOST)
"""Codes with which a clip is sent again: nothing is wrong with it, nor did we cancel it."""


def rendered(clip: ClipTask, now: float) -> Ending:
    """The ending of a clip that is here; ``partial`` if it is less than was asked for."""
    if clip.deadline.left_ms(now) < 0:
        return overdue(clip, now)
    outcome = Outcome.PARTIAL if clip.facts.get("given_up") else Outcome.MET
    return Ending(outcome, FinishReason.STOP)


def overdue(clip: ClipTask, now: float) -> Ending:
    """The ending of a clip whose deadline is past."""
    late_ms = max(0.0, -clip.deadline.left_ms(now))
    where = f"in {_stage_of(clip)}"
    if clip.stage is Stage.QUEUED:
        where = "before it began"
        if clip.loss is not None:
            where = "while it waited for another instance after its own was lost"
    error = DeadlineExceeded(f"the deadline passed {where}", exceeded_by_ms=late_ms)
    return Ending(Outcome.MISSED, FinishReason.DEADLINE, error)


def code_of(words: str) -> tuple[Code | None, str]:
    """Split a worker's error, ``code: message``; the code is None for Triton's own errors."""
    head, colon, rest = words.partition(": ")
    try:
        return (Code(head), rest) if colon else (None, words)
    except ValueError:
        return None, words


def judged(clip: ClipTask, code: Code | None, message: str, now: float) -> Ending:
    """The ending that a worker's error means, if the clip is not sent again."""
    match code:
        case Code.INVALID_REQUEST:
            field = message.partition(": ")[0]
            is_field = field.startswith("recipe")
            return refused(InvalidRequest(message, field=field if is_field else None))
        case Code.DEADLINE_EXCEEDED:
            if clip.deadline.left_ms(now) < 0:
                return overdue(clip, now)
            error = DeadlineExceeded(message)
            if not clip.marks.started:
                return refused(error)
            return Ending(Outcome.MISSED, FinishReason.DEADLINE, error)
        case Code.NO_CAPACITY:
            return refused(NoCapacity(message))
        case Code.DRAINING:
            return failed(Draining(message))
        case Code.CANCELLED | Code.INSTANCE_LOST | None:
            return failed(InstanceLost(f"the instance could not continue this: {message}"))
        case _:
            return failed(EngineError(message))


def _stage_of(clip: ClipTask) -> str:
    """The last stage that reported progress."""
    return next(reversed(clip.percents), "") or "the worker's queue"
