"""An event loop whose time stands still while the machine gives this process no processor.

On a busy machine a process may stand still for most of a second, or run at a quarter of its speed.
By the usual loop every deadline of a test would then pass in between, which is not what the test
is about. By this one a pause costs next to nothing, work is cheap however slow the processor is,
and what is waited for takes as long as ever.
"""

import asyncio
import selectors
import time
from collections.abc import Callable

SLICE_S = 0.01
"""What one wait of the selector counts for at most; a longer one is cut up into such."""
WORK_S = 0.001
"""What passes at most between two looks at the clock in which nothing was waited for."""


class SteadyClock:
    """Real time, less the stretches in which it was not this process's turn."""

    def __init__(self, real: Callable[[], float] = time.monotonic) -> None:
        self._real = real
        self._seen = self._now = real()

    def now(self, at_most_s: float = WORK_S) -> float:
        """Seconds; since the last look no more than ``at_most_s`` have passed."""
        real = self._real()
        self._now += min(real - self._seen, at_most_s)
        self._seen = real
        return self._now

    def advance(self, seconds: float) -> None:
        self._now += seconds


class SteadySelector(selectors.DefaultSelector):
    """Waits in slices, so that a pause while it waits is told from the waiting."""

    def __init__(self, clock: SteadyClock) -> None:
        super().__init__()
        self._clock = clock
        self.times = 1.0
        """How many times as fast time passes while nothing happens."""

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        now = self._clock.now()
        until = float("inf") if timeout is None else now + max(timeout, 0.0)
        while True:
            slice_s = min(max(until - now, 0.0), SLICE_S)
            began, ready = now, super().select(slice_s / self.times)
            now = self._clock.now(slice_s)
            if not ready and self.times > 1:
                self._clock.advance(max(0.0, began + slice_s - now))
                now = self._clock.now()
            if ready or now >= until:
                return ready


class SteadyLoop(asyncio.SelectorEventLoop):
    """``time()`` is that of a :class:`SteadyClock`; all timers and deadlines go by it."""

    def __init__(self) -> None:
        self._clock = SteadyClock()
        self._waits = SteadySelector(self._clock)
        super().__init__(self._waits)

    def time(self) -> float:
        return self._clock.now()

    def advance(self, seconds: float) -> None:
        """Let so much time pass at once; what falls due meanwhile runs next."""
        self._clock.advance(seconds)

    def hurry(self, times: float) -> None:
        """Have time pass so many times as fast while this process waits: for tests whose other
        end is in this process, too."""
        self._waits.times = times


def advance(seconds: float) -> None:
    """Let time pass on the loop that runs this test. Wall time stays as it is."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteadyLoop)
    loop.advance(seconds)


def hurry(times: float) -> None:
    """Have time pass so many times as fast while the loop that runs this test waits."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, SteadyLoop)
    loop.hurry(times)
