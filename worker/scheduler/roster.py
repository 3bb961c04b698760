"""The requests that an engine holds, and the limits beyond which it refuses more."""

from bisect import insort
from collections.abc import Collection

from protocol import Code, Feature, features_of
from protocol.card import context_note
from worker.core import Job
from worker.scheduler.end_reason import TOO_LATE_TO_START, EndReason, failed
from worker.scheduler.order import latest_start
from worker.scheduler.request import Request
from worker.scheduler.step_time import StepTime


class Roster:
    """One engine's requests by state. Used by its thread."""

    def __init__(
        self,
        *,
        capacity_tokens: int,
        context_tokens: int,
        vocab_size: int,
        max_held: int,
        min_start_budget_s: float,
        lacks: Collection[Feature] = (),
    ) -> None:
        """``capacity_tokens``: maximum tokens of one request; ``context_tokens``: the model's own
        context, which may be longer."""
        self.capacity_tokens = capacity_tokens
        self.min_start_budget_s = min_start_budget_s
        self._context_tokens = context_tokens
        self._vocab_size = vocab_size
        self._max_held = max_held
        self._lacks = lacks
        self.step_time = StepTime()
        self.running: list[Request] = []
        self.waiting: list[Request] = []  # least slack first
        self.paused: list[Request] = []
        self.leaving: dict[Request, float] = {}
        """Aborted requests that may still hold memory, with the clock time of the abort."""

    @property
    def held(self) -> int:
        """Number of requests in any state."""
        return len(self.running) + len(self.waiting) + len(self.paused) + len(self.leaving)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting or self.paused or self.leaving)

    def enqueue(self, request: Request, now: float) -> EndReason | None:
        """Put a request in the queue, least slack first. Returns the reason if it is refused."""
        refusal = self._refusal(request, now)
        if refusal is None:
            # A job that only reads its prompt still generates a token, which is not published.
            wanted = request.prompt_tokens + max(1, request.job.sampling.max_tokens)
            request.limit_tokens = min(wanted, self.capacity_tokens)
            room = request.limit_tokens - request.prompt_tokens
            request.least_tokens = min(request.least_tokens, room)
            request.latest_start = latest_start(request, self.step_time)
            insort(self.waiting, request, key=queue_order)
        return refusal

    def unblock(self) -> None:
        """Note that a request that could not be admitted may now fit."""

    def _refusal(self, request: Request, now: float) -> EndReason | None:
        # Orchestrators already avoid engines that lack a feature.
        if self._lacks and (missing := _features_of(request.job).intersection(self._lacks)):
            return failed(
                Code.INVALID_REQUEST,
                f"this worker's engine has no {', '.join(sorted(missing))}; leave that out, or ask"
                " for a model of an instance with another engine",
            )
        if not request.tokens:
            return failed(Code.INVALID_REQUEST, "the prompt has no tokens; send at least one")
        if request.prompt_tokens >= self.capacity_tokens:
            return failed(
                Code.CONTEXT_OVERFLOW,
                f"the prompt has {request.prompt_tokens} tokens, but this model's maximum"
                f" context length is {self.capacity_tokens} tokens: at most"
                f" {self.capacity_tokens - 1} leave room for a token of the answer"
                + context_note(self.capacity_tokens, self._context_tokens),
            )
        if min(request.tokens) < 0 or max(request.tokens) >= self._vocab_size:
            return failed(
                Code.INVALID_REQUEST,
                f"the prompt has token ids outside 0 to {self._vocab_size - 1}, the"
                " model's vocabulary; encode it with the model's own tokenizer",
            )
        if request.job.deadline - now <= self.min_start_budget_s:
            return TOO_LATE_TO_START
        if self.held >= self._max_held:
            return failed(
                Code.NO_CAPACITY,
                f"the worker holds {self.held} jobs, its maximum; try again later or elsewhere",
            )
        return None


def queue_order(request: Request) -> tuple[float, float]:
    return request.latest_start, request.submitted_at


def _features_of(job: Job) -> set[Feature]:
    grammar = [] if job.constraint is None else [Feature.GRAMMAR]
    return {*features_of(job.sampling), *grammar}
