"""Records the end of every clip: its outcome, then metrics and one log line (DL-10)."""

from collections import deque

from clips.dispatch.task import ClipTask
from clips.plan.budgets import ClipStage, quantile
from orchestrator.clock import Clock
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.settle import log_end
from orchestrator.telemetry.metrics import MetricRow, Metrics, Samples
from protocol import Outcome

TIMES = (*(stage.value for stage in ClipStage), "total")
"""Names of the times in a result, whose fields end in ``_ms``."""
QUANTILES = (0.5, 0.95, 0.99)
_KEPT = 512


class ClipLedger:
    """Ends clips, each exactly once: a second call changes nothing."""

    def __init__(self, metrics: Metrics, clock: Clock) -> None:
        self._clock = clock
        self.offered = metrics.counter("slots_offered", "slots", "Clips offered")
        self.outcomes = metrics.counter(
            "slot_outcomes", "slots", "What offered slots came to (DL-10)", "outcome", "code"
        )
        self.retries = metrics.counter(
            "slot_retries", "slots", "Clips sent again: an instance was lost, or had no room"
        )
        self.queue_ms = metrics.histogram("slot_queue_ms", "From arrival to an instance")
        self.end_ms = metrics.histogram("slot_end_ms", "From arrival to the clip")
        self.settled = dict.fromkeys(Outcome, 0)
        """Number of clips by outcome (DL-10)."""
        self.recent: dict[str, deque[float]] = {name: deque(maxlen=_KEPT) for name in TIMES}
        """Times of the last finished clips, by name, in ms."""
        metrics.watch(self, _ROWS)

    def settle(self, clip: ClipTask, ending: Ending) -> bool:
        """End a clip. False if it has ended before."""
        if clip.ending is not None:
            return False
        clip.end(ending, self._clock.now())
        code = "" if ending.error is None else ending.error.code.value
        self.outcomes.labels(ending.outcome, code).inc()
        self.settled[ending.outcome] += 1
        if clip.marks.dispatched:
            self.queue_ms.observe(1000 * (clip.marks.dispatched - clip.marks.received))
        if ending.outcome in (Outcome.MET, Outcome.PARTIAL):
            self.end_ms.observe(1000 * (clip.marks.ended - clip.marks.received))
            for name, times in self.recent.items():
                # A part that was not rendered, such as a dropped check, has no time to report.
                if (ms := _number(clip.facts.get(f"{name}_ms")) or 0.0) > 0:
                    times.append(ms)
        self._write(clip, ending)
        return True

    def _write(self, clip: ClipTask, ending: Ending) -> None:
        marks, facts = clip.marks, clip.facts
        numbers = (*(f"{name}_ms" for name in TIMES), "seconds", "size")
        log_end(
            clip,
            ending,
            "slots",
            attempts=clip.attempts or None,
            queue_ms=round(1000 * ((marks.dispatched or marks.ended) - marks.received), 1),
            end_ms=round(1000 * (marks.ended - marks.received), 1),
            left_ms=round(clip.deadline.left_ms(marks.ended), 1),
            **{name: _number(facts.get(name)) for name in numbers},
        )


def _number(value: object) -> float | int | None:
    return value if isinstance(value, int | float) else None


def _quantiles(ledger: ClipLedger) -> Samples:
    for name, times in ledger.recent.items():
        if times:
            for q in QUANTILES:
                yield (name, f"{q:g}"), quantile(sorted(times), q)


_ROWS: tuple[MetricRow[ClipLedger], ...] = (
    MetricRow(
        "gauge",
        "slot_stage_quantile_ms",
        "ms",
        "What stages took, over the last 512 finished slots: P50, P95 and P99",
        _quantiles,
        ("stage", "quantile"),
    ),
)
