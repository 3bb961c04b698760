"""Counters of a third-party engine's backend, and its state as one snapshot."""

from dataclasses import dataclass
from typing import Final

from protocol import WorkerStats
from worker.engine.stats import Totals
from worker.engines.backend import BackendLoad
from worker.scheduler.step_time import StepTime

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
        not_finite_total=totals.not_finite,
    )
