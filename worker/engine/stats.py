"""The engine's counters since it was built, and its state as one snapshot."""

from dataclasses import dataclass

from protocol import WorkerStats
from worker.engine.expiry import ExpiryCheck
from worker.kv_disk.base import TierStats
from worker.scheduler.scheduler import Scheduler


@dataclass(slots=True)
class Totals:
    """Counters of the engine's thread. ``busy_s`` is the time spent in ``steps``."""

    jobs: int = 0
    tokens: int = 0
    late_tokens: int = 0
    steps: int = 0
    busy_s: float = 0.0
    prompt_tokens: int = 0
    """Prompt tokens computed, without those found in the cache."""
    not_finite: int = 0
    """Jobs that ended because their numbers were not finite."""

    def count_step(self, duration_s: float, prompt_tokens: int) -> None:
        """Count one step that computed so many tokens of prompts."""
        self.steps += 1
        self.busy_s += duration_s
        self.prompt_tokens += prompt_tokens


def snapshot(
    scheduler: Scheduler,
    expiry: ExpiryCheck,
    totals: Totals,
    disk: TierStats,
    stream_utilization: float,
) -> WorkerStats:
    """The state after a step."""
    pool, step_time, prefix_cache = scheduler.pool, scheduler.step_time, scheduler.prefix_cache
    return WorkerStats(
        kv_blocks_total=pool.total,
        kv_blocks_used=pool.used_count,
        kv_blocks_free=pool.free_count,
        running=len(scheduler.running),
        waiting=len(scheduler.waiting),
        step_ms=step_time.step_s * 1e3,
        prefill_tokens_per_s=step_time.prefill_tokens_per_s,
        tokens_total=totals.tokens,
        late_tokens_total=totals.late_tokens,
        jobs_total=totals.jobs,
        check_us=expiry.check_us,
        steps_total=totals.steps,
        busy_ms_total=totals.busy_s * 1e3,
        prefill_tokens_total=totals.prompt_tokens,
        cached_tokens_total=prefix_cache.cached_tokens_total,
        kv_blocks_cached=pool.cached_count,
        evicted_blocks_total=pool.evictions_total,
        hit_blocks_total=prefix_cache.hit_blocks_total,
        missed_blocks_total=prefix_cache.missed_blocks_total,
        disk_saved_blocks_total=disk.saved_blocks,
        disk_saved_sessions_total=disk.saved_sessions,
        disk_loaded_blocks_total=disk.loaded_blocks,
        disk_save_ms_total=disk.save_ms,
        disk_load_ms_total=disk.load_ms,
        disk_failures_total=disk.failures,
        disk_skipped_blocks_total=disk.skipped_blocks,
        stream_utilization=stream_utilization,
        paused=len(scheduler.paused),
        sessions=len(scheduler.sessions),
        session_blocks=pool.kept_count,
        session_evicted_blocks_total=pool.kept_evictions_total,
        sessions_expired_total=scheduler.sessions.expired_total,
        sessions_displaced_total=scheduler.sessions.displaced_total,
        not_finite_total=totals.not_finite,
    )
