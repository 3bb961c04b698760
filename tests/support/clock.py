"""Clocks that a test moves: by hand, or beyond what has really passed."""

import asyncio
import heapq
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.clock import Instant, LoopClock


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

    def cpu_s(self) -> float:
        return self._now  # as of a thread that never waits

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


class LeapTimer:
    """A timer of a ``LeapingClock``, which arms it again at every leap."""

    def __init__(self, clock: "LeapingClock", when: float, callback: Callable[[], object]) -> None:
        self._clock = clock
        self._when = when
        self._callback = callback
        self._handle: asyncio.Handle | None = None
        self.arm()

    def arm(self) -> None:
        self._disarm()
        self._handle = self._clock.run_at(self._when, self._run)

    def cancel(self) -> None:
        self._disarm()
        self._clock.timers.pop(self, None)

    def _disarm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _run(self) -> None:
        self._clock.timers.pop(self, None)
        self._callback()


class LeapingClock(LoopClock):
    """The running event loop's, which a test can set forward, and hold.

    A deadline can so be far away for as long as a slow machine takes to get ready for it, and pass
    the moment it is to. The wall clock goes along.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._leapt_s = 0.0
        self._held: Instant | None = None
        self.timers: dict[LeapTimer, None] = {}
        """In the order of their making."""
        self.now = lambda: self._moment(loop.time, "mono")
        self.unix = lambda: self._moment(time.time, "unix")

    def _moment(self, source: Callable[[], float], which: str) -> float:
        start: float = source() if self._held is None else getattr(self._held, which)
        return start + self._leapt_s

    def call_at(self, when: float, callback: Callable[[], object]) -> LeapTimer:
        timer = LeapTimer(self, when, callback)
        self.timers[timer] = None
        return timer

    def run_at(self, when: float, run: Callable[[], None]) -> asyncio.Handle | None:
        """Have the event loop run it; None where the clock is held before that."""
        if self._held is None:
            return self._loop.call_at(when - self._leapt_s, run)
        return self._loop.call_soon(run) if when <= self.now() else None

    def leap(self, seconds: float) -> None:
        """Let so much time pass at once: what is due by then runs when the loop does next."""
        self._leapt_s += seconds
        self._arm_all()

    def hold(self) -> None:
        """Stand still: from now on time passes by leaps alone."""
        self._held = Instant(self._loop.time(), time.time())
        self._arm_all()

    def _arm_all(self) -> None:
        for timer in self.timers:
            timer.arm()
