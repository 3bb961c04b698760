"""What a third-party engine has to do for ``SteppedEngine``, which does all the rest.

A backend batches, computes and samples. Deadlines, aborts, accounts and the order in which jobs
start are not its to know: ``SteppedEngine`` looks at them between two steps, and tells it which
jobs to take up and which to give up.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from protocol import Code, FinishReason, PromptLogprobs, TokenLogprob, WorkerStats
from worker.core import Job
from worker.engine.stats import Totals
from worker.scheduler.step_time import StepTime


@dataclass(slots=True)
class Produced:
    """What one step produced for one job. ``ids`` includes the end token, where one ended it."""

    handle: int
    ids: Sequence[int] = ()
    logprobs: list[TokenLogprob] | None = None
    """Log-probabilities parallel to ``ids``, where the job asks for them."""
    prompt: PromptLogprobs | None = None
    end: FinishReason | None = None
    """``STOP`` or ``LENGTH`` if the backend's own rules ended the job, ``ERROR`` if it failed."""
    code: Code | None = None
    """Why the job failed, with ``ERROR``; ``message`` says it to people."""
    message: str = ""
    cached_tokens: int = 0
    """Prompt tokens found computed already; stated with a job's first tokens."""


@dataclass(frozen=True, slots=True)
class BackendLoad:
    """A backend's state between two steps. Blocks are KV blocks of the card's ``block_tokens``."""

    kv_blocks_total: int
    kv_blocks_used: int
    running: int
    waiting: int
    kv_blocks_cached: int = 0
    hit_blocks_total: int = 0
    missed_blocks_total: int = 0
    evicted_blocks_total: int = 0
    prompt_tokens_total: int = 0
    """Prompt tokens computed, without those found in the cache."""


class Backend(Protocol):
    """A third-party engine; all but ``interrupt`` is called on its thread only, between steps."""

    def add(self, handle: int, job: Job, max_tokens: int) -> None:
        """Accept a job of at most ``max_tokens`` new tokens; with its prompt it fits the context.

        Raises ``RequestError`` for what the backend cannot do; it has not accepted the job then.
        """

    def abort(self, handles: Collection[int]) -> None:
        """Give jobs up. They produce nothing from here on; their blocks are free at the latest when
        the next ``step`` returns, unless ``holds`` says otherwise. Unknown handles are ignored."""

    def holds(self, handle: int) -> bool:
        """Whether the memory of a job that was given up is not free yet, a step after ``abort`` or
        later."""

    def step(self, wait_s: float) -> Sequence[Produced]:
        """Do at most one engine step, and return what it produced.

        Empty after ``wait_s`` without a step. Raises what makes the backend unusable for good,
        ``DeviceLost`` among others.
        """

    def interrupt(self) -> None:
        """Any thread: have a ``step`` that waits return soon, since there is news, or the next one
        if none waits. May do nothing where ``step`` computes by itself."""

    @property
    def has_failed(self) -> bool:
        """Any thread: whether it can compute no more although no ``step`` has said so, such as when
        a process of its own has ended."""

    def load(self) -> BackendLoad:
        """How full the backend is; asked several times a step."""

    def close(self) -> None:
        """Release everything. Idempotent."""


NO_LOAD: Final = BackendLoad(0, 0, 0, 0)
"""Load of a backend that was closed."""


@dataclass(slots=True)
class BackendTotals(Totals):
    """Totals, with ``cached_tokens``: prompt tokens that were found computed already."""

    cached_tokens: int = 0


def snapshot(
    load: BackendLoad,
    totals: BackendTotals,
    step_time: StepTime,
    *,
    held: int,
    waiting: int,
    check_us: float,
) -> WorkerStats:
    """The state after a step; ``held`` jobs are the backend's, which may queue some on its own."""
    queued = min(load.waiting, held)
    return WorkerStats(
        kv_blocks_total=load.kv_blocks_total,
        kv_blocks_used=load.kv_blocks_used,
        kv_blocks_free=load.kv_blocks_total - load.kv_blocks_used,
        running=held - queued,
        waiting=waiting + queued,
        step_ms=step_time.step_s * 1e3,
        prefill_tokens_per_s=step_time.prefill_tokens_per_s,
        tokens_total=totals.tokens,
        late_tokens_total=totals.late_tokens,
        jobs_total=totals.jobs,
        check_us=check_us,
        steps_total=totals.steps,
        busy_ms_total=totals.busy_s * 1e3,
        prefill_tokens_total=totals.prompt_tokens,
        cached_tokens_total=totals.cached_tokens,
        kv_blocks_cached=load.kv_blocks_cached,
        evicted_blocks_total=load.evicted_blocks_total,
        hit_blocks_total=load.hit_blocks_total,
        missed_blocks_total=load.missed_blocks_total,
    )
