"""Who computes what in the next step. No tensors, no devices, no clock.

Each step spends a token budget: running requests first (one token each for those that decode,
then chunks of prompts), then the waiting ones with the least slack. A request is admitted only
when its blocks can be reserved to completion, so nothing that runs is ever preempted.
"""

from bisect import insort
from dataclasses import dataclass

from worker.engine.block_pool import BlockPool
from worker.engine.request import STARVED, Ending, Request
from worker.engine.runner import Plan, Row
from worker.protocol import Code, FinishReason


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits; the names are those of ``WorkerSettings`` and ``ModelCard``."""

    vocab_size: int
    context_tokens: int
    block_tokens: int
    max_running: int
    max_waiting: int
    max_step_tokens: int
    min_start_budget_s: float

    def __post_init__(self) -> None:
        if self.max_step_tokens < self.max_running:
            raise ValueError(
                f"max_step_tokens ({self.max_step_tokens}) is less than max_running"
                f" ({self.max_running}): every running job needs one token per step;"
                " raise the former or lower the latter"
            )


@dataclass(slots=True)
class Schedule:
    """``plan`` is None when there is nothing to compute; ``started`` were admitted for it."""

    plan: Plan | None
    started: list[Request]


class Scheduler:
    """Owns the pool, the running set and the queue. Used by one thread."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.config = config
        self.pool = pool
        self.running: list[Request] = []
        self.waiting: list[Request] = []  # least slack first
        self._free_slots = list(range(config.max_running - 1, -1, -1))

    @property
    def capacity_tokens(self) -> int:
        """The most tokens that one request can have: context or the whole pool."""
        return min(self.config.context_tokens, self.pool.total * self.config.block_tokens)

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def enqueue(self, request: Request, now: float) -> Ending | None:
        """Put a request in the queue, or say why not."""
        refusal = self._refusal(request, now)
        if refusal is None:
            wanted = request.prompt_tokens + request.job.sampling.max_tokens
            request.limit_tokens = min(wanted, self.capacity_tokens)
            room = request.limit_tokens - request.prompt_tokens
            request.least_tokens = min(request.least_tokens, room)
            insort(self.waiting, request, key=_slack_order)
        return refusal

    def starved(self, now: float) -> list[Request]:
        """Waiting requests that have too little time left to start (DL-3), still in the queue."""
        late = 0
        while late < len(self.waiting) and self._is_too_late(self.waiting[late], now):
            late += 1
        return self.waiting[:late]

    def schedule(self) -> Schedule:
        """Plan the next step and admit into it whom the budget, slots and blocks allow."""
        decodes: list[Row] = []
        prefilling: list[Request] = []
        for request in self.running:
            computed = request.computed
            if len(request.tokens) - computed == 1:
                decodes.append(Row(request, computed, 1, True))
            else:
                prefilling.append(request)
        rows, budget = decodes, self.config.max_step_tokens - len(decodes)
        decode_count = len(decodes)

        for request in sorted(prefilling, key=_slack_order):
            if not budget:
                break
            budget -= _add_chunk(rows, request, budget)
        started = []
        while budget and (admitted := self._admit_next()):
            started.append(admitted)
            budget -= _add_chunk(rows, admitted, budget)

        if not rows:
            return Schedule(None, started)
        tokens = self.config.max_step_tokens - budget
        return Schedule(Plan(rows, decode_count, tokens), started)

    def advance(self, row: Row, new_ids: list[int]) -> None:
        """Book what a step computed. All but the last new token are in the pool already."""
        request = row.request
        request.computed = row.start + row.count
        if new_ids:
            request.tokens.extend(new_ids)
            request.computed += len(new_ids) - 1
            if request.least_tokens:
                request.least_tokens = max(0, request.least_tokens - len(new_ids))

    def release(self, request: Request) -> None:
        """Forget a running or waiting request; its slot and blocks are free when this returns."""
        if request.slot < 0:
            self.waiting.remove(request)
            return
        self.running.remove(request)
        self._free_slots.append(request.slot)
        self.pool.free(request.blocks)
        request.slot = -1
        request.blocks = []

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when slots, blocks and requests do not add up."""
        self.pool.check_integrity()
        held = [block for request in self.running for block in request.blocks]
        assert len(held) == len(set(held)), "two requests share a block"
        assert len(held) == self.pool.used_count, "blocks are used that no request holds"
        slots = self._free_slots + [request.slot for request in self.running]
        assert sorted(slots) == list(range(self.config.max_running)), "a slot was lost or shared"
        for request in self.running:
            assert len(request.blocks) == self._blocks_for(request.limit_tokens)
            assert request.computed < len(request.tokens) <= request.limit_tokens
        for request in self.waiting:
            assert request.slot == -1 and not request.blocks, "a waiting request holds something"
        assert self.waiting == sorted(self.waiting, key=_slack_order), "the queue lost its order"

    def _refusal(self, request: Request, now: float) -> Ending | None:
        if not request.tokens:
            return _refused(Code.INVALID_REQUEST, "the prompt has no tokens; send at least one")
        if min(request.tokens) < 0 or max(request.tokens) >= self.config.vocab_size:
            return _refused(
                Code.INVALID_REQUEST,
                f"the prompt has token ids outside 0 to {self.config.vocab_size - 1}, the"
                " model's vocabulary; encode it with the model's own tokenizer",
            )
        if request.prompt_tokens >= self.capacity_tokens:
            return _refused(
                Code.CONTEXT_OVERFLOW,
                f"the prompt has {request.prompt_tokens} tokens; at most"
                f" {self.capacity_tokens - 1} leave room for a token of the answer",
            )
        if self._is_too_late(request, now):
            return STARVED
        held = len(self.running) + len(self.waiting)
        if held >= self.config.max_running + self.config.max_waiting:
            return _refused(
                Code.NO_CAPACITY,
                f"the worker holds {held} jobs, its maximum; try again later or elsewhere",
            )
        return None

    def _admit_next(self) -> Request | None:
        """The head of the queue with a slot and its blocks, unless one of them is lacking.

        Nobody overtakes a head that does not fit: small requests would starve a large one.
        """
        if not self.waiting or not self._free_slots:
            return None
        request = self.waiting[0]
        needed = self._blocks_for(request.limit_tokens)
        if needed > self.pool.free_count:
            return None
        del self.waiting[0]
        request.blocks = self.pool.allocate(needed)
        request.slot = self._free_slots.pop()
        self.running.append(request)
        return request

    def _is_too_late(self, request: Request, now: float) -> bool:
        return request.job.deadline - now <= self.config.min_start_budget_s

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_tokens)


def _slack_order(request: Request) -> tuple[float, float]:
    return request.job.deadline, request.submitted_at


def _add_chunk(rows: list[Row], request: Request, budget: int) -> int:
    left = len(request.tokens) - request.computed
    count = min(left, budget)
    rows.append(Row(request, request.computed, count, count == left))
    return count


def _refused(code: Code, message: str) -> Ending:
    return Ending(FinishReason.ERROR, code, message)
