"""Runners that make tokens up, for benchmarks and tests of everything around the model. No torch.

They go through the same scheduler and pool as a model does, so that leaks show. The text is a
fixed cycle of plain words: token n of any answer is the same in every run.
"""

import time
from collections.abc import Callable, Sequence

from worker.engine.core import Clock
from worker.engine.runner import Plan, StepResult
from worker.protocol import TokenLogprob

_FREE_TOKENS_PER_STEP = 8
"""Tokens per row and step of the free runner: few enough for many small frames, as in real life."""


class _Cycle:
    """Slices of an endless repetition of ``ids``."""

    def __init__(self, ids: Sequence[int], longest: int) -> None:
        if not ids:
            raise ValueError("a synthetic engine needs at least one token to repeat")
        self._period = len(ids)
        repeats = -(-longest // self._period) + 1
        self._ids = list(ids) * repeats

    def take(self, start: int, count: int) -> list[int]:
        first = start % self._period
        return self._ids[first : first + count]


class FreeRunner:
    """As fast as the path around it takes: several tokens per row and step, no waiting."""

    def __init__(self, cycle: Sequence[int], tokens_per_step: int = _FREE_TOKENS_PER_STEP) -> None:
        self._cycle = _Cycle(cycle, tokens_per_step)
        self._tokens_per_step = tokens_per_step

    def execute(self, plan: Plan) -> StepResult:
        ids: list[list[int]] = []
        logprobs: list[list[TokenLogprob] | None] = []
        wants_logprobs = False
        take, most = self._cycle.take, self._tokens_per_step
        for row in plan.rows:
            if not row.samples:
                ids.append([])
                continue
            request = row.request
            total = len(request.tokens)
            ids.append(take(total - request.prompt_tokens, min(most, request.limit_tokens - total)))
            wants_logprobs = wants_logprobs or request.job.sampling.logprobs is not None
        if not wants_logprobs:
            return StepResult(ids)
        for row, row_ids in zip(plan.rows, ids, strict=True):
            top = row.request.job.sampling.logprobs
            logprobs.append(None if top is None else [_certain(i, top) for i in row_ids])
        return StepResult(ids, logprobs)

    def close(self) -> None:
        """Nothing to release."""


class PacedRunner:
    """One token per row and step, steps ``step_s`` apart on an absolute schedule.

    A step that starts late because the engine had nothing to do begins a new schedule; one that
    starts late because the engine was busy catches up, as long as it is less than a step behind.
    """

    def __init__(
        self,
        cycle: Sequence[int],
        step_s: float,
        *,
        clock: Clock = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._free = FreeRunner(cycle, tokens_per_step=1)
        self._step_s = step_s
        self._clock = clock
        self._sleep = sleep
        self._last_due = -step_s

    def execute(self, plan: Plan) -> StepResult:
        result = self._free.execute(plan)
        now = self._clock()
        in_step = now < self._last_due + self._step_s
        due = (self._last_due if in_step else now) + self._step_s
        self._last_due = due
        while (left := due - self._clock()) > 0:
            self._sleep(left)
        return result

    def close(self) -> None:
        """Nothing to release."""


def _certain(token: int, top: int) -> TokenLogprob:
    return TokenLogprob(0.0, [(token, 0.0)] if top else [])
