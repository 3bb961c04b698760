"""Collects the slot model's state for its watchers."""

from collections import Counter, deque

from clips.plan.budgets import quantile
from clips.render.buffers import BufferPool
from clips.render.pipeline import ClipPipeline
from clips.render.queue import MOST_WAITING, ClipQueue
from clips.state import AbortState, ClipsState, StageState

_KEPT = 256


class AbortTimes:
    """Times from a clip's early end until its buffers are free, by cause."""

    def __init__(self) -> None:
        self._ms: deque[float] = deque(maxlen=_KEPT)
        self._of: dict[str, deque[float]] = {}
        self._counts: Counter[str] = Counter()

    def observe(self, cause: str, seconds: float) -> None:
        """Record that a clip was ended, and its buffers were free after ``seconds``."""
        self._counts[cause] += 1
        self._ms.append(1000 * seconds)
        self._of.setdefault(cause, deque(maxlen=_KEPT)).append(1000 * seconds)

    def quantile_ms(self, q: float) -> float | None:
        """Quantile over all causes; None before there was one."""
        return quantile(sorted(self._ms), q) if self._ms else None

    def by_cause(self) -> dict[str, AbortState]:
        """Counts and quantiles for each cause seen."""
        return {
            cause: AbortState(
                self._counts[cause], quantile(sorted(ms), 0.50), quantile(sorted(ms), 0.99)
            )
            for cause, ms in self._of.items()
        }


def state_of(
    pipeline: ClipPipeline, pool: BufferPool, queue: ClipQueue, aborts: AbortTimes
) -> ClipsState:
    settings, providers = pipeline.settings, pipeline.providers.by_stage()
    return ClipsState(
        max_size=settings.size,
        max_seconds=settings.seconds,
        buffer_s=settings.buffer_s,
        slots_total=pool.slots,
        slots_free=pool.free,
        waiting=queue.waiting,
        max_waiting=MOST_WAITING,
        free_in_s=queue.free_in_s(),
        stages={
            stage: StageState(
                providers[stage].name, times.seconds_per_unit, times.p95_ms, times.least_per_unit
            )
            for stage, times in pipeline.times.items()
        },
        memory_used_bytes=pipeline.memory.meter.used_bytes(),
        abort_to_free_p50_ms=aborts.quantile_ms(0.50),
        abort_to_free_p99_ms=aborts.quantile_ms(0.99),
        aborts=aborts.by_cause(),
    )
