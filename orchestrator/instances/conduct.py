"""How a job's end reflects on the instance that had it (DL-11)."""

from typing import Protocol

from orchestrator.instances.breaker import Breakers, JobEnd, Ticket
from orchestrator.instances.instance import Instance
from orchestrator.prediction import Load, StepModel, Work
from orchestrator.telemetry.log import fields, service_log
from worker.protocol import AbortCause, Code, End, FinishReason

_ENDS = {
    Code.CANCELLED: JobEnd.ABORTED,
    Code.CLIENT_DISCONNECTED: JobEnd.ABORTED,
    Code.DEADLINE_EXCEEDED: JobEnd.DEADLINE,
    Code.ENGINE_ERROR: JobEnd.FAILED,
    Code.INTERNAL: JobEnd.FAILED,
}
"""Every other code is a refusal: of the request, or for want of room or time."""


class Sent(Protocol):
    """What is known of a job since it was sent. ``dispatched_at`` is in seconds of the clock."""

    @property
    def ticket(self) -> Ticket: ...
    @property
    def cause(self) -> AbortCause | None: ...
    @property
    def basis(self) -> tuple[StepModel, Load] | None: ...
    @property
    def dispatched_at(self) -> float: ...


def charge(
    breakers: Breakers, instance: Instance | None, sent: Sent, end: End | None, now: float
) -> None:
    """Judge an instance by one job, which was lost if it has no ``end``."""
    if instance is None:  # forgotten meanwhile
        return
    how = JobEnd.LOST if end is None else how_ended(end, sent.cause)
    predicted_ms = 0.0 if end is None else _predicted_ms(instance, sent, end)
    actual_ms = 1000 * (now - sent.dispatched_at)
    if breakers.end(sent.ticket, how, predicted_ms=predicted_ms, actual_ms=actual_ms):
        service_log.warning(
            "an instance rests: it fails, or takes far longer than predicted",
            extra=fields(instance=instance.address, last=how.value),
        )


def how_ended(end: End, cause: AbortCause | None) -> JobEnd:
    """What a worker's last word says of the worker. ``cause`` is why we told it to stop."""
    if cause is not None or end.reason is FinishReason.CANCELLED:
        return JobEnd.ABORTED
    if end.code is not None:
        return _ENDS.get(end.code, JobEnd.REFUSED)
    return JobEnd.DEADLINE if end.reason is FinishReason.DEADLINE else JobEnd.FINISHED


def _predicted_ms(instance: Instance, sent: Sent, end: End) -> float:
    """What few jobs that did just what this one did would have exceeded; 0 while that is unknown.

    Jobs that came while it ran slowed it down too, and are no fault of the instance.
    """
    if sent.basis is None or not sent.basis[0].known:
        return 0.0
    model, load = sent.basis
    work = Work(end.prompt_tokens, end.cached_tokens, max(1, end.completion_tokens))
    return max(model.estimate(work, at).upper_ms for at in (load, instance.load_ahead))
