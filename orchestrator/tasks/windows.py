"""Attainment and goodput over the last 1, 5 and 15 minutes, by class and by tenant (DL-10).

Counters leave such windows to whoever scrapes them; these are for a page, a terminal or a person
that does not. A window is a ring of slices: anything older than it is dropped a slice at a time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from orchestrator.clock import Clock
from orchestrator.tasks.job import Priority
from orchestrator.telemetry.metrics import TENANT, Row, Samples
from protocol import Outcome

WINDOWS_S = {"1m": 60.0, "5m": 300.0, "15m": 900.0}
SLICES = 12

Key = tuple[Priority, str]
"""Class and tenant."""


@dataclass(slots=True)
class Tally:
    """Numbers of requests that ended, and of those that were met."""

    ended: int = 0
    met: int = 0


class SlidingWindow:
    """Requests that ended in the last ``length_s`` seconds, or up to one slice less."""

    def __init__(self, length_s: float, now: float) -> None:
        self._slice_s = length_s / SLICES
        self._began = now
        self._current = 0
        self._slices: list[dict[Key, Tally]] = [{} for _ in range(SLICES)]

    def count(self, key: Key, outcome: Outcome, now: float) -> None:
        self._advance(now)
        tallies = self._slices[self._current % SLICES]
        tally = tallies.get(key)
        if tally is None:
            tally = tallies[key] = Tally()
        tally.ended += 1
        tally.met += outcome is Outcome.MET

    def totals(self, now: float) -> dict[Key, Tally]:
        """Tallies of all slices together, by key."""
        self._advance(now)
        totals: dict[Key, Tally] = {}
        for part in self._slices:
            for key, tally in part.items():
                total = totals.setdefault(key, Tally())
                total.ended += tally.ended
                total.met += tally.met
        return totals

    def covered_s(self, now: float) -> float:
        """Seconds that the window covers: less than its length at first."""
        elapsed = now - self._began
        oldest = max(0, int(elapsed / self._slice_s) - SLICES + 1)
        return elapsed - oldest * self._slice_s

    def _advance(self, now: float) -> None:
        current = int((now - self._began) / self._slice_s)
        for at in range(max(self._current + 1, current - SLICES + 1), current + 1):
            self._slices[at % SLICES] = {}
        self._current = max(current, self._current)


class Windows:
    """One window of each length."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._windows = {name: SlidingWindow(s, clock.now()) for name, s in WINDOWS_S.items()}

    def count(self, priority: Priority, tenant: str, outcome: Outcome) -> None:
        """Count a request that ended; ``tenant`` has a bounded number of values."""
        now, key = self._clock.now(), (priority, tenant)
        for window in self._windows.values():
            window.count(key, outcome, now)

    def by_class(self) -> Iterator[tuple[str, str, Tally, float]]:
        """Names of each window and class, their tally, and the seconds that the window covers."""
        return self._grouped(lambda key: key[0].value)

    def by_tenant(self) -> Iterator[tuple[str, str, Tally, float]]:
        """Names of each window and tenant, their tally, and the seconds that the window covers."""
        return self._grouped(lambda key: key[1])

    def _grouped(self, group: Callable[[Key], str]) -> Iterator[tuple[str, str, Tally, float]]:
        now = self._clock.now()
        for name, window in self._windows.items():
            totals: dict[str, Tally] = {}
            for key, tally in window.totals(now).items():
                total = totals.setdefault(group(key), Tally())
                total.ended += tally.ended
                total.met += tally.met
            for value, total in totals.items():
                yield name, value, total, window.covered_s(now)


def _attainment(
    read: Callable[[Windows], Iterator[tuple[str, str, Tally, float]]],
) -> Callable[[Windows], Samples]:
    return lambda windows: (
        ((window, value), tally.met / tally.ended) for window, value, tally, _ in read(windows)
    )


def _goodput(windows: Windows) -> Samples:
    for window, priority, tally, seconds in windows.by_class():
        # In the first second, one request would make an exaggerated rate.
        yield (window, priority), tally.met / max(1.0, seconds)


WINDOWED: tuple[Row[Windows], ...] = (
    Row(
        "gauge",
        "class_attainment",
        "share",
        "Requests met, of those that ended in the last minutes; none where none ended",
        _attainment(Windows.by_class),
        ("window", "class"),
    ),
    Row(
        "gauge",
        "goodput",
        "requests/s",
        "Requests met per second in the last minutes (DL-10)",
        _goodput,
        ("window", "class"),
    ),
)

BY_TENANT: tuple[Row[Windows], ...] = (
    Row(
        "gauge",
        "tenant_attainment",
        "share",
        "Requests met, of those that ended in the last minutes, by tenant; for operators",
        _attainment(Windows.by_tenant),
        ("window", TENANT),
    ),
)
