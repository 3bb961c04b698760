"""An event loop whose time jumps to the next timer instead of waiting for it."""

import asyncio
import gc
import logging
import selectors
from collections.abc import Callable, Coroutine
from typing import TypeVar

from orchestrator.clock import Timer

T = TypeVar("T")


class Deadlock(RuntimeError):
    """Raised where everything waits and nothing is due: nobody else will wake a simulation."""


class _Jumps(selectors.SelectSelector):
    """Selector that advances time by what a real one would have waited."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlock("nothing is due any more")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """Loop for coroutines that use timers and each other only: no sockets, no threads."""

    def __init__(self) -> None:
        self._jumps = _Jumps()
        super().__init__(self._jumps)

    def time(self) -> float:
        return self._jumps.now


class VirtualClock:
    """The orchestrator's clock on a ``VirtualLoop``. The simulation begins at a round wall time."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop
        self.now = loop.time

    def unix(self) -> float:
        return 1_800_000_000.0 + self._loop.time()

    def cpu_s(self) -> float:
        """Nothing: what the orchestrator computes takes no time here."""
        return 0.0

    def call_at(self, when: float, callback: Callable[[], object]) -> Timer:
        return self._loop.call_at(when, callback)


def run_quietly(make: Callable[[VirtualLoop], Coroutine[None, None, T]]) -> T:
    """Run ``make``'s coroutine to its end on a loop of its own, without the service's log."""
    loop = VirtualLoop()
    log = logging.getLogger("orchestrator")
    level, was_enabled = log.level, gc.isenabled()
    log.setLevel(logging.ERROR)
    gc.disable()  # objects in cycles are few, and a run is short
    try:
        return loop.run_until_complete(make(loop))
    finally:
        loop.close()
        log.setLevel(level)
        if was_enabled:
            gc.enable()
