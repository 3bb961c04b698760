"""The end of every task: its outcome, then metrics, one log line, the journal (DL-10)."""

from dataclasses import dataclass

from orchestrator.clock import Clock
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
    QueueFull,
    TidegateError,
    Unavailable,
)
from orchestrator.tasks.deadline import Part
from orchestrator.tasks.journal.memory import Journal, Record
from orchestrator.tasks.metrics import TaskMetrics
from orchestrator.tasks.task import Budget, Ending, Task
from orchestrator.telemetry.log import access_log, fields
from worker.protocol import AbortCause, Code, End, FinishReason, OnDeadline, Outcome


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a task came to, before it is written down."""

    outcome: Outcome
    finish_reason: FinishReason
    error: TidegateError | None = None
    cause: AbortCause | None = None
    missed_part: Part | None = None
    """Of what was missed, where it is not the whole (DL-14)."""


_OUT_OF_TIME = (Code.DEADLINE_EXCEEDED, Code.DEADLINE_INFEASIBLE)

# ── verdicts ─────────────────────────────────────────────────────────────────────────────────────


def judge(task: Task, end: End, now: float) -> Verdict:
    """What the worker's terminal record means for the client, whose clock is the deadline."""
    if end.code is None and end.reason in (FinishReason.STOP, FinishReason.LENGTH):
        in_time = task.deadline.left_ms(now) >= 0
        return Verdict(Outcome.MET, end.reason) if in_time else overdue(task, now)
    if end.code is None and end.reason is FinishReason.DEADLINE:
        return overdue(task, now)
    if end.reason is FinishReason.DEADLINE or end.code in _OUT_OF_TIME:
        return _out_of_time(task, end, now)
    return _worker_failure(end)


def overdue(task: Task, now: float) -> Verdict:
    """The deadline is past: an error, or what there is where the client asked for that (DL-6)."""
    if task.job.on_deadline is not OnDeadline.ERROR and task.completion_tokens:
        return Verdict(Outcome.PARTIAL, FinishReason.DEADLINE)
    late_ms = max(0.0, -task.deadline.left_ms(now))
    tokens = f"after {task.completion_tokens} tokens" if task.completion_tokens else "before any"
    error = DeadlineExceeded(f"the deadline passed {tokens}", exceeded_by_ms=late_ms)
    return Verdict(Outcome.MISSED, FinishReason.DEADLINE, error)


def no_first_token(task: Task, now: float) -> Verdict:
    """The first token's own deadline is past, and there is none (DL-14)."""
    error = DeadlineExceeded(
        "the first token's deadline passed before any came",
        exceeded_by_ms=1000 * (now - task.parts.cut_at),
        part=Part.FIRST_TOKEN,
    )
    return Verdict(Outcome.MISSED, FinishReason.DEADLINE, error, missed_part=Part.FIRST_TOKEN)


def aborted(cause: AbortCause) -> Verdict:
    """Somebody who may wants the task to stop."""
    error: Aborted
    if cause is AbortCause.DISCONNECT:
        error = ClientDisconnected("the client is gone")
    else:
        error = Cancelled("the task was cancelled")
    return Verdict(Outcome.ABORTED, FinishReason.CANCELLED, error, cause)


def failed(error: TidegateError) -> Verdict:
    """Something broke on our side."""
    return Verdict(Outcome.FAILED, FinishReason.ERROR, error)


def refused(error: TidegateError) -> Verdict:
    """Never taken on."""
    return Verdict(Outcome.REFUSED, FinishReason.ERROR, error)


def _out_of_time(task: Task, end: End, now: float) -> Verdict:
    """A worker gave up for lack of time: before it began, or as soon as that was certain (DL-3)."""
    left_ms = task.deadline.left_ms(now)
    if left_ms < 0:
        return overdue(task, now)
    message = end.message or f"{left_ms:.0f} ms until the deadline are too little for what is left"
    error = DeadlineExceeded(message, exceeded_by_ms=0.0)
    if not task.completion_tokens:
        return refused(error)
    return Verdict(Outcome.MISSED, FinishReason.DEADLINE, error)


def _worker_failure(end: End) -> Verdict:
    code = end.code or (
        Code.CANCELLED if end.reason is FinishReason.CANCELLED else Code.ENGINE_ERROR
    )
    message = end.message or f"the worker ended the request: {code}"
    match code:
        case Code.INVALID_REQUEST:
            return refused(InvalidRequest(message))
        case Code.CONTEXT_OVERFLOW:
            return refused(ContextOverflow(message))
        case Code.QUEUE_FULL:
            return refused(QueueFull(message))
        case Code.NO_CAPACITY:
            return refused(NoCapacity(message))
        case Code.DRAINING:
            return failed(Draining(message))
        case Code.INSTANCE_LOST:
            return failed(InstanceLost(message))
        case Code.CANCELLED:
            return aborted(AbortCause.CANCEL)
        case Code.CLIENT_DISCONNECTED:
            return aborted(AbortCause.DISCONNECT)
        case _:
            return failed(EngineError(message))


# ── writing it down ──────────────────────────────────────────────────────────────────────────────


class Settler:
    """Ends tasks, each exactly once: whoever comes second changes nothing."""

    def __init__(self, metrics: TaskMetrics, journal: Journal, clock: Clock) -> None:
        self.metrics = metrics
        self._journal = journal
        self._clock = clock

    def settle(self, task: Task, verdict: Verdict, end: End | None = None) -> bool:
        """End a task, with the worker's terminal record where there is one. False if too late."""
        if task.ending is not None:
            return False
        now = self._clock.now()
        budget = budget_of(task, end, now)
        outcome, missed_part = _with_parts(task, verdict, now)
        ending = Ending(
            outcome=outcome,
            finish_reason=verdict.finish_reason,
            error=verdict.error,
            cause=verdict.cause,
            budget=budget,
            tail=end.tail if end is not None and verdict.error is None else "",
            missed_part=missed_part,
        )
        task.end(ending, now)
        self._measure(task, ending)
        self._write(task, ending)
        return True

    def _measure(self, task: Task, ending: Ending) -> None:
        metrics, marks, error = self.metrics, task.marks, ending.error
        code = error.code.value if error is not None else ""
        metrics.outcomes.labels(task.job.api, task.model, ending.outcome, code).inc()
        metrics.settled[ending.outcome] += 1
        if ending.missed_part is not None:
            metrics.missed_parts.labels(ending.missed_part).inc()
        metrics.tokens_generated += task.completion_tokens
        if ending.outcome not in (Outcome.MET, Outcome.PARTIAL):
            metrics.tokens_wasted += task.completion_tokens
        metrics.total_ms.observe(1000 * (marks.ended - marks.received))
        if marks.queued:
            metrics.admission_ms.observe(1000 * (marks.queued - marks.received))
        if marks.dispatched:
            metrics.queue_ms.observe(1000 * (marks.dispatched - marks.queued))
        if marks.has_started:
            metrics.dispatch_ms.observe(1000 * (marks.started - marks.dispatched))
        if marks.first_token:
            metrics.ttft_ms.observe(1000 * (marks.first_token - marks.received))

    def _write(self, task: Task, ending: Ending) -> None:
        marks, error = task.marks, ending.error
        code = error.code.value if error is not None else ""
        access_log.info(
            "%s %s",
            task.job.api,
            ending.outcome,
            extra=fields(
                task_id=task.id,
                correlation_id=task.correlation_id,
                model=task.model,
                outcome=ending.outcome.value,
                missed_part=ending.missed_part,
                finish_reason=ending.finish_reason.value,
                code=code or None,
                error=error.message if isinstance(error, EngineError | Unavailable) else None,
                instance=task.instance or None,
                prompt_tokens=task.prompt_tokens,
                completion_tokens=task.completion_tokens,
                ttft_ms=_ms(marks.received, marks.first_token),
                total_ms=_ms(marks.received, marks.ended),
                budget=str(ending.budget),
                key=task.job.key or None,
            ),
        )
        self._journal.settled(
            Record(
                task_id=task.id,
                correlation_id=task.correlation_id,
                api=task.job.api.value,
                model=task.model,
                outcome=ending.outcome,
                code=code,
                prompt_tokens=task.prompt_tokens,
                completion_tokens=task.completion_tokens,
                ended_unix=self._clock.unix(),
            )
        )


def _with_parts(task: Task, verdict: Verdict, now: float) -> tuple[Outcome, Part | None]:
    """The outcome, and what was missed: a text that ended well is met by all its parts (DL-14)."""
    if verdict.outcome in (Outcome.MET, Outcome.PARTIAL):
        part = task.missed_at(now)
        return (verdict.outcome if part is None else Outcome.MISSED), part
    if verdict.outcome is Outcome.MISSED:
        return verdict.outcome, verdict.missed_part or Part.WHOLE
    return verdict.outcome, None


def budget_of(task: Task, end: End | None, now: float) -> Budget:
    """Where a task's time went, up to ``now``; the worker's own figures where it reported (DL-9).

    ``queue`` is everything before a worker began on it but the way there, which is ``route``. A
    worker's news leave after the step that they are about, so the way is what is left of the time
    to the first token when the worker's own figures are taken off.
    """
    marks = task.marks
    started, first = marks.started if marks.has_started else 0.0, marks.first_token
    reported_ms = task.worker_wait_ms if started else 0.0
    wait_ms = reported_ms if end is None else end.wait_ms
    queue_ms = 1000 * ((marks.dispatched or now) - marks.received) + wait_ms
    route_ms = 1000 * (started - marks.dispatched) - wait_ms if started else 0.0
    if end is not None:
        prefill_ms, decode_ms = end.prefill_ms, end.decode_ms
        if first:
            route_ms = 1000 * (first - marks.dispatched) - wait_ms - prefill_ms
    else:
        prefill_ms = 1000 * ((first or now) - started) if started else 0.0
        decode_ms = 1000 * (now - first) if first else 0.0
    return Budget(
        queue_ms=queue_ms,
        route_ms=max(0.0, route_ms),
        prefill_ms=prefill_ms,
        decode_ms=decode_ms,
        left_ms=task.deadline.left_ms(now),
    )


def _ms(start: float, end: float) -> float | None:
    return round(1000 * (end - start), 3) if end else None
