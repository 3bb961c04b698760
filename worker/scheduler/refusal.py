"""Limits beyond which every engine refuses a job, and the order of waiting jobs."""

from bisect import insort
from collections.abc import Collection
from dataclasses import dataclass

from protocol import Code, Feature, FinishReason, context_note, features_of
from worker.core import Job
from worker.scheduler.end_reason import TOO_LATE_TO_START, EndReason
from worker.scheduler.order import latest_start
from worker.scheduler.request import Request
from worker.scheduler.step_time import StepTime


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Limits of one engine; it holds at most ``max_held`` running, waiting and paused jobs."""

    capacity_tokens: int
    """Maximum number of tokens of one request."""
    context_tokens: int
    """The model's own context, which may be longer."""
    vocab_size: int
    max_held: int
    min_start_budget_s: float

    def refusal(self, request: Request, held: int, now: float) -> EndReason | None:
        """Why an engine that holds ``held`` jobs does not queue this one; None if it does."""
        if not request.tokens:
            return refused(Code.INVALID_REQUEST, "the prompt has no tokens; send at least one")
        if request.prompt_tokens >= self.capacity_tokens:
            return refused(
                Code.CONTEXT_OVERFLOW,
                f"the prompt has {request.prompt_tokens} tokens, but this model's maximum"
                f" context length is {self.capacity_tokens} tokens: at most"
                f" {self.capacity_tokens - 1} leave room for a token of the answer"
                + context_note(self.capacity_tokens, self.context_tokens),
            )
        if min(request.tokens) < 0 or max(request.tokens) >= self.vocab_size:
            return refused(
                Code.INVALID_REQUEST,
                f"the prompt has token ids outside 0 to {self.vocab_size - 1}, the"
                " model's vocabulary; encode it with the model's own tokenizer",
            )
        if request.job.deadline - now <= self.min_start_budget_s:
            return TOO_LATE_TO_START
        if held >= self.max_held:
            return refused(
                Code.NO_CAPACITY,
                f"the worker holds {held} jobs, its maximum; try again later or elsewhere",
            )
        return None

    def line_up(self, request: Request, waiting: list[Request], step_time: StepTime) -> None:
        """Insert a request that was not refused into ``waiting``, least slack first."""
        # A job that only reads its prompt still generates a token, which is not published.
        wanted = request.prompt_tokens + max(1, request.job.sampling.max_tokens)
        request.limit_tokens = min(wanted, self.capacity_tokens)
        room = request.limit_tokens - request.prompt_tokens
        request.least_tokens = min(request.least_tokens, room)
        request.latest_start = latest_start(request, step_time)
        insort(waiting, request, key=queue_order)


def queue_order(request: Request) -> tuple[float, float]:
    return request.latest_start, request.submitted_at


def refused(code: Code, message: str) -> EndReason:
    """End of a job that is refused."""
    return EndReason(FinishReason.ERROR, code, message)


def lacking(job: Job, lacks: Collection[Feature]) -> EndReason | None:
    """Why this engine cannot run a job, or None. Orchestrators already avoid such engines."""
    needed = features_of(job.sampling)
    if job.constraint is not None:
        needed.append(Feature.GRAMMAR)
    missing = [feature.value for feature in needed if feature in lacks]
    if not missing:
        return None
    return refused(
        Code.INVALID_REQUEST,
        f"this worker's engine has no {', '.join(missing)}; leave that out, or ask for a model of"
        " an instance with another engine",
    )
