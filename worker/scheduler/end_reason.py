"""Reasons for the end of jobs, and the last event, which states one."""

from typing import NamedTuple

from protocol import AbortCause, Code, FinishReason
from worker.core import Job, JobFinished
from worker.scheduler.request import Request


class EndReason(NamedTuple):
    """How a job ends; ``code`` is None when it ends well."""

    reason: FinishReason
    code: Code | None = None
    message: str = ""


def failed(code: Code, message: str) -> EndReason:
    """End of a job that fails or is refused."""
    return EndReason(FinishReason.ERROR, code, message)


def _out_of_time(message: str) -> EndReason:
    return EndReason(FinishReason.DEADLINE, Code.DEADLINE_EXCEEDED, message)


STOPPED = EndReason(FinishReason.STOP)
LENGTH = EndReason(FinishReason.LENGTH)
CUT_SHORT = EndReason(FinishReason.DEADLINE)
DEADLINE_PASSED = _out_of_time("the deadline passed before the end of the text")
CANNOT_FINISH = _out_of_time("the remaining required tokens no longer fit before the deadline")
TOO_LATE_TO_START = _out_of_time("too little time remained when the generation could have started")
NOT_FINITE = failed(
    Code.NOT_FINITE,
    "the model's numbers for this text are not finite (NaN or infinite); a retry on the same"
    " instance will most likely fail in the same way",
)
NOT_FINITE_LOG = (
    "numbers that are not finite after %d tokens: the request ends with not_finite, and its KV is"
    " dropped. If many do, check the weights' files and the device, or compute in float32"
)
ENGINE_LOST = failed(
    Code.INSTANCE_LOST,
    "the whole engine failed while it worked on this job; its process is being replaced",
)
DRAINED = EndReason(FinishReason.CANCELLED, Code.DRAINING, "the worker is shutting down")

ABORTED: dict[AbortCause, EndReason] = {
    AbortCause.CANCEL: EndReason(FinishReason.CANCELLED, Code.CANCELLED, "cancelled"),
    AbortCause.DISCONNECT: EndReason(
        FinishReason.CANCELLED, Code.CLIENT_DISCONNECTED, "the client disconnected"
    ),
    AbortCause.LANE_LOST: EndReason(
        FinishReason.CANCELLED, Code.CLIENT_DISCONNECTED, "the lane of this job was lost"
    ),
    AbortCause.DRAIN: DRAINED,
    AbortCause.STOP_STRING: STOPPED,
}


def loss_of(job: Job) -> EndReason:
    """End of a job when its engine fails: a job that had not started is not the cause."""
    return ENGINE_LOST if job.has_started else DRAINED


def finished(request: Request, end_reason: EndReason, freed_at: float) -> JobFinished:
    """A job's last event, made at ``freed_at`` (engine's clock), when slot and blocks are free."""
    job = request.job
    started = freed_at if request.started_at is None else request.started_at
    first = freed_at if request.first_token_at is None else request.first_token_at
    abort_ms = None
    if end_reason.reason is FinishReason.CANCELLED:
        abort_ms = (freed_at - job.aborted_at) * 1e3 if job.abort is not None else 0.0
    elif end_reason.reason is FinishReason.DEADLINE:
        abort_ms = max(0.0, freed_at - job.deadline) * 1e3
    return JobFinished(
        job=job,
        reason=end_reason.reason,
        code=end_reason.code,
        message=end_reason.message,
        prompt_tokens=request.prompt_tokens,
        completion_tokens=request.generated,
        late_tokens=request.late_tokens,
        wait_ms=(started - request.submitted_at) * 1e3,
        prefill_ms=(first - started) * 1e3,
        decode_ms=(freed_at - first) * 1e3,
        left_ms=(job.deadline - freed_at) * 1e3,
        abort_ms=abort_ms,
        cached_tokens=request.cached_tokens,
        spared=request.spared,
    )
