"""Clocks that a test moves by hand."""

import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class MovedClock:
    """Monotonic seconds, and as many more as a test has let pass: for threads that wait."""

    passed_s: float = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.passed_s


class ManualTimer:
    def __init__(self, callback: Callable[[], object]) -> None:
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        self.callback = None


class ManualClock:
    """Starts at 100 s; timers run inside ``advance``."""

    def __init__(self) -> None:
        self._now = 100.0
        self._timers: list[tuple[float, int, ManualTimer]] = []
        self._count = itertools.count()

    def now(self) -> float:
        return self._now

    def unix(self) -> float:
        return 1_800_000_000.0 + self._now

    def call_at(self, when: float, callback: Callable[[], object]) -> ManualTimer:
        timer = ManualTimer(callback)
        heapq.heappush(self._timers, (when, next(self._count), timer))
        return timer

    def advance(self, seconds: float) -> None:
        end = self._now + seconds
        while self._timers and self._timers[0][0] <= end:
            when, _, timer = heapq.heappop(self._timers)
            self._now = max(self._now, when)
            if timer.callback is not None:
                timer.callback()
        self._now = end
