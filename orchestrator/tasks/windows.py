"""Attainment and goodput over the last 1, 5 and 15 minutes, by class and by tenant (DL-10).

They serve pages and terminals without Prometheus. A window is a ring of slices, which are dropped
one by one.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from orchestrator.clock import Clock
from orchestrator.tasks.deadline import Part
from orchestrator.tasks.ending import Budget, Ending
from orchestrator.tasks.job import Priority
from orchestrator.tasks.task import Task
from orchestrator.telemetry.metrics import TENANT, MetricRow, Samples
from protocol import Outcome

LIKELY = 0.9
"""Chance of being in time at dispatch from which a task was expected to be met."""


class MissStage(StrEnum):
    """The stages that can cause a miss."""

    QUEUE = "queue"
    """The task waited here or in the worker, or was never sent."""
    ROUTE = "route"
    """The way to the worker and back."""
    PREFILL = "prefill"
    DECODE = "decode"
    RETRY = "retry"
    """An instance did not finish the task, so it restarted on another."""
    PREDICTION = "prediction"
    """The task was sent in time by its prediction, but the worker took longer."""


TIMED = (MissStage.QUEUE, MissStage.ROUTE, MissStage.PREFILL, MissStage.DECODE)


def times_of(budget: Budget) -> dict[MissStage, float]:
    spent = (budget.queue_ms, budget.route_ms, budget.prefill_ms, budget.decode_ms)
    return dict(zip(TIMED, spent, strict=True))


def blame(task: Task, ending: Ending) -> MissStage:
    """The stage that caused a miss.

    The first that applies: an instance failed; the task was never sent; the route took longest; its
    chance was good when it was sent; otherwise the stage that took longest. Decoding is never the
    cause of a late first token, and always the cause of a late token after it.
    """
    if task.attempts:
        return MissStage.RETRY
    if not task.marks.dispatched:
        return MissStage.QUEUE
    if ending.missed_part is Part.TOKEN_GAP:
        return MissStage.DECODE
    times = times_of(ending.budget)
    if ending.missed_part is Part.FIRST_TOKEN:
        del times[MissStage.DECODE]
    longest = max(times, key=times.__getitem__)
    if longest is MissStage.ROUTE:
        return longest
    if task.given_chance is not None and task.given_chance >= LIKELY:
        return MissStage.PREDICTION
    return longest


WINDOWS_S = {"1m": 60.0, "5m": 300.0, "15m": 900.0}
SLICES = 12

CLASS = "class"
Key = tuple[str, ...]
"""A label and a value of it, or a value alone."""


@dataclass(slots=True)
class Tally:
    ended: int = 0
    met: int = 0


class SlidingWindow:
    """Requests that ended in the last ``length_s`` seconds, minus up to one slice."""

    def __init__(self, length_s: float, now: float) -> None:
        self._slice_s = length_s / SLICES
        self._began = now
        self._current = 0
        self._slices = [defaultdict[Key, Tally](Tally) for _ in range(SLICES)]

    def count(self, key: Key, outcome: Outcome, now: float) -> None:
        self._advance(now)
        tally = self._slices[self._current % SLICES][key]
        tally.ended += 1
        tally.met += outcome is Outcome.MET

    def totals(self, now: float) -> dict[Key, Tally]:
        self._advance(now)
        totals = defaultdict[Key, Tally](Tally)
        for part in self._slices:
            for key, tally in part.items():
                total = totals[key]
                total.ended += tally.ended
                total.met += tally.met
        return totals

    def covered_s(self, now: float) -> float:
        """Seconds that the window covers: at first less than its length."""
        elapsed = now - self._began
        oldest = max(0, int(elapsed / self._slice_s) - SLICES + 1)
        return elapsed - oldest * self._slice_s

    def _advance(self, now: float) -> None:
        current = int((now - self._began) / self._slice_s)
        for at in range(max(self._current + 1, current - SLICES + 1), current + 1):
            self._slices[at % SLICES].clear()
        self._current = max(current, self._current)


class Windows:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._windows = {name: SlidingWindow(s, clock.now()) for name, s in WINDOWS_S.items()}

    def count(self, priority: Priority, tenant: str, outcome: Outcome) -> None:
        """Count a request that ended; ``tenant`` has a bounded number of values."""
        now = self._clock.now()
        for window in self._windows.values():
            window.count((CLASS, priority.value), outcome, now)
            window.count((TENANT, tenant), outcome, now)

    def by(self, label: str) -> Iterator[tuple[str, str, Tally, float]]:
        """Names of each window and value of ``label``, their tally, and the seconds that the window
        covers."""
        now = self._clock.now()
        for name, window in self._windows.items():
            for key, tally in window.totals(now).items():
                if key[0] == label:
                    yield name, key[1], tally, window.covered_s(now)


def _attainment(label: str) -> Callable[[Windows], Samples]:
    return lambda windows: (
        ((window, value), tally.met / tally.ended) for window, value, tally, _ in windows.by(label)
    )


def _goodput(windows: Windows) -> Samples:
    for window, priority, tally, seconds in windows.by(CLASS):
        # In the first second, one request would make an exaggerated rate.
        yield (window, priority), tally.met / max(1.0, seconds)


WINDOWED: tuple[MetricRow[Windows], ...] = (
    MetricRow(
        "gauge",
        "class_attainment",
        "share",
        "Share of requests ended in the last minutes that were met; absent if none ended",
        _attainment(CLASS),
        ("window", CLASS),
    ),
    MetricRow(
        "gauge",
        "goodput",
        "requests/s",
        "Requests met per second in the last minutes (DL-10)",
        _goodput,
        ("window", CLASS),
    ),
    MetricRow(
        "gauge",
        "tenant_attainment",
        "share",
        "Share of requests ended in the last minutes that were met, by tenant; for operators",
        _attainment(TENANT),
        ("window", TENANT),
    ),
)
