"""Maps a worker's ``End`` and other events to the client's ending. Pure functions.

These endings lack the budget, which the ``Settler`` fills in.
"""

from orchestrator.errors import (
    Aborted,
    Cancelled,
    ClientDisconnected,
    ContextOverflow,
    DeadlineExceeded,
    Draining,
    EngineError,
    InstanceLost,
    InvalidRequest,
    NoCapacity,
    NotFinite,
    PoisonRequest,
    QueueFull,
    TidegateError,
)
from orchestrator.tasks.deadline import Part
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.task import Task
from protocol import AbortCause, Code, End, FinishReason, OnDeadline, Outcome

_OUT_OF_TIME = (Code.DEADLINE_EXCEEDED, Code.DEADLINE_INFEASIBLE)


def judge(task: Task, end: End, now: float) -> Ending:
    """The client's ending, from the worker's terminal record and the deadline."""
    if end.code is None and end.reason in (FinishReason.STOP, FinishReason.LENGTH):
        if task.earlier is not None:
            return differs(task)
        in_time = task.deadline.left_ms(now) >= 0
        return Ending(Outcome.MET, end.reason) if in_time else overdue(task, now)
    if end.code is None and end.reason is FinishReason.DEADLINE:
        return overdue(task, now)
    if end.reason is FinishReason.DEADLINE or end.code in _OUT_OF_TIME:
        return _out_of_time(task, end, now)
    return _worker_failure(task, end)


def overdue(task: Task, now: float) -> Ending:
    """Ending for a passed deadline: an error, or the text so far if the client asked for it (DL-6).
    A ``fit`` answer that is complete in time is met.
    """
    tokens = task.completion_tokens
    is_fit = task.job.on_deadline is OnDeadline.FIT and tokens >= max(1, task.sampling.min_tokens)
    if is_fit and task.earlier is None and task.deadline.left_ms(now) >= 0:
        return Ending(Outcome.MET, FinishReason.LENGTH)
    if _takes_part(task):
        return Ending(Outcome.PARTIAL, FinishReason.DEADLINE)
    late_ms = max(0.0, -task.deadline.left_ms(now))
    when = f"after {tokens} tokens" if tokens else "before any token"
    error = DeadlineExceeded(f"the deadline passed {when}", exceeded_by_ms=late_ms)
    return Ending(Outcome.MISSED, FinishReason.DEADLINE, error)


def no_first_token(task: Task, now: float) -> Ending:
    error = DeadlineExceeded(
        "the first token's deadline passed before any token",
        exceeded_by_ms=1000 * (now - task.parts.cut_at),
        part=Part.FIRST_TOKEN,
    )
    return Ending(Outcome.MISSED, FinishReason.DEADLINE, error, missed_part=Part.FIRST_TOKEN)


def aborted(cause: AbortCause) -> Ending:
    error: Aborted
    if cause is AbortCause.DISCONNECT:
        error = ClientDisconnected("the client disconnected")
    else:
        error = Cancelled("the request was cancelled")
    return Ending(Outcome.ABORTED, FinishReason.CANCELLED, error, cause)


def failed(error: TidegateError) -> Ending:
    return Ending(Outcome.FAILED, FinishReason.ERROR, error)


def lost(task: Task, error: TidegateError) -> Ending:
    """Ending for an accepted task that no instance can continue; ``error`` says why. A client that
    accepts a partial text at the deadline gets the text so far at once (DL-6)."""
    return Ending(Outcome.PARTIAL, FinishReason.DEADLINE) if _takes_part(task) else failed(error)


def poisonous(task: Task) -> Ending:
    """Ending for a task with which two workers died: it is not sent to a third."""
    return lost(
        task,
        PoisonRequest(
            "two workers died while they worked on this request, which may be the cause; it is not"
            " sent to a third. See their logs; send it again after the cause is known"
        ),
    )


def lost_in_restart(task: Task, why: str) -> Ending:
    """Ending for a durable task of an earlier process that cannot be continued."""
    return lost(task, InstanceLost(f"the service restarted and the task cannot continue: {why}"))


def differs(task: Task) -> Ending:
    """Ending for an earlier process's text that was regenerated differently."""
    return lost_in_restart(task, "the regenerated text is different")


def refused(error: TidegateError) -> Ending:
    return Ending(Outcome.REFUSED, FinishReason.ERROR, error)


def _out_of_time(task: Task, end: End, now: float) -> Ending:
    """Ending for a worker that gave up for lack of time: before the start, or as soon as it was
    certain (DL-3)."""
    left_ms = task.deadline.left_ms(now)
    if left_ms < 0 or _takes_part(task):
        return overdue(task, now)
    message = end.message or f"{left_ms:.0f} ms until the deadline are too few for the rest"
    error = DeadlineExceeded(message)
    if not task.completion_tokens:
        return refused(error)
    return Ending(Outcome.MISSED, FinishReason.DEADLINE, error)


def _takes_part(task: Task) -> bool:
    return task.job.on_deadline is not OnDeadline.ERROR and task.has_text


def _worker_failure(task: Task, end: End) -> Ending:
    code = end.code or (
        Code.CANCELLED if end.reason is FinishReason.CANCELLED else Code.ENGINE_ERROR
    )
    message = end.message or f"the worker ended the request: {code}"
    match code:
        case Code.INVALID_REQUEST:
            return refused(InvalidRequest(message))
        case Code.CONTEXT_OVERFLOW:
            return refused(ContextOverflow(message, field="prompt"))
        case Code.QUEUE_FULL:
            return _turned_away(task, QueueFull(message))
        case Code.NO_CAPACITY:
            return _turned_away(task, NoCapacity(message))
        case Code.DRAINING:
            return lost(task, Draining(message))
        case Code.INSTANCE_LOST:
            return lost(task, InstanceLost(message))
        case Code.NOT_FINITE:
            return failed(NotFinite(message))
        case Code.CANCELLED:
            return aborted(AbortCause.CANCEL)
        case Code.CLIENT_DISCONNECTED:
            return aborted(AbortCause.DISCONNECT)
        case _:
            return failed(EngineError(message))


def _turned_away(task: Task, error: TidegateError) -> Ending:
    """Ending for a task for which an instance had no room: its first instance, or one that should
    continue its text."""
    return lost(task, error) if task.has_text else refused(error)
