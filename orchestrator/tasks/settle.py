"""Ends tasks: sets the outcome, then updates metrics and writes one log line (DL-10)."""

from dataclasses import replace

from orchestrator.clock import Clock
from orchestrator.errors import EngineError, Unavailable
from orchestrator.tasks.deadline import Part
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.metrics import TaskMetrics
from orchestrator.tasks.task import Task
from orchestrator.tasks.work import AnyWork
from orchestrator.telemetry.log import Field, access_log, fields
from orchestrator.telemetry.narration import narrated, of_ending
from protocol import End, FinishReason, OnDeadline, Outcome


class Settler:
    """Ends tasks, each exactly once: a second end changes nothing."""

    def __init__(self, metrics: TaskMetrics, clock: Clock) -> None:
        self.metrics = metrics
        self._clock = clock

    def settle(
        self, task: Task, ending: Ending, end: End | None = None, *, is_left: bool = False
    ) -> bool:
        """End a task, with its worker's ``End`` if there is one. False if it has already ended.

        Fills in the budget, the missed part, and the rest of an earlier process's text. A task that
        ``is_left`` to the next process gets its outcome there; here no metric or log counts it.
        """
        if task.ending is not None:
            return False
        task.restore()
        now = self._clock.now()
        if end is not None:
            # A continued job's prompt included its generated tokens.
            task.cached_tokens = min(end.cached_tokens, task.prompt_tokens)
        _settle_fit(task, ending)
        outcome, missed_part = _with_parts(task, ending, now)
        ending = replace(
            ending,
            outcome=outcome,
            budget=task.time_spent.budget(now, task.deadline.left_ms(now), end),
            tail=(end or ending).tail if ending.error is None else "",
            missed_part=missed_part,
            stop=(end or ending).stop,
            stop_token_id=(end or ending).stop_token_id,
        )
        task.end(ending, now)
        if task.spans is not None:
            task.spans.ended(task)
        if is_left:
            return True
        self.metrics.ended(task, ending)
        marks = task.marks
        log_end(
            task,
            ending,
            task.job.api.value,
            model=task.served_name,
            missed_part=ending.missed_part,
            finish_reason=ending.finish_reason.value,
            prompt_tokens=task.prompt_tokens,
            completion_tokens=task.completion_tokens,
            ttft_ms=_ms(marks.received, marks.first_token),
            total_ms=_ms(marks.received, marks.ended),
            budget=str(ending.budget),
            deadline_source=task.deadline.source or None,
        )
        return True


def log_end(work: AnyWork, ending: Ending, api: str, **more: Field) -> None:
    """Write the log line for the end of a task or clip."""
    error, trace = ending.error, work.job.trace
    told = of_ending(ending.outcome, error.code if error is not None else None, ending.cause)
    access_log.info(
        told.sentence,
        extra=fields(
            **narrated(told, work.served_name),
            api=api,
            **work.names(),
            trace_id=trace.trace_id if trace is not None else None,
            outcome=ending.outcome.value,
            code=error.code.value if error is not None else None,
            error=error.message if isinstance(error, EngineError | Unavailable) else None,
            instance=work.instance or None,
            **more,
            key=work.job.key or None,
        ),
    )


def _settle_fit(task: Task, ending: Ending) -> None:
    """Replace the forecast of a ``fit`` answer's length by its actual length (DL-6)."""
    if task.job.on_deadline is not OnDeadline.FIT or ending.error is not None:
        return
    made = task.completion_tokens
    if ending.finish_reason is FinishReason.STOP:
        if task.fitted_tokens is not None:
            task.fitted_tokens = max(task.fitted_tokens, made)
    elif task.fitted_tokens is not None or made < task.sampling.max_tokens:
        task.fitted_tokens = made


def _with_parts(task: Task, ending: Ending, now: float) -> tuple[Outcome, Part | None]:
    """The outcome and the missed part: a text is met if all of its parts are met (DL-14)."""
    if ending.outcome in (Outcome.MET, Outcome.PARTIAL):
        part = task.missed_at(now)
        return (ending.outcome if part is None else Outcome.MISSED), part
    if ending.outcome is Outcome.MISSED:
        return ending.outcome, ending.missed_part or Part.WHOLE
    return ending.outcome, None


def _ms(start: float, end: float) -> float | None:
    return round(1000 * (end - start), 3) if end else None
