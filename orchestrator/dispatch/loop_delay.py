"""Measures how late this process gets to run, for texts that must leave before their deadline.

On a machine whose processors others take, an event loop wakes up some milliseconds late, and so
does the client beside it. Timers measure this delay, and only while somebody wants it.
"""

from orchestrator.clock import Clock
from orchestrator.prediction import Quantiles

EVERY_S = 0.02
LONG_DELAY = 0.98
_WINDOW = 256
_ASLEEP_S = 1.0
"""Largest delay of a timer that counts. A longer one means that the whole machine stood still."""


class LoopDelay:
    """Measures the event loop's delay while asked to."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._delays_s = Quantiles([0.0] * 32, _WINDOW)
        self._until = 0.0
        self._due_at: float | None = None

    @property
    def long_s(self) -> float:
        """A delay in seconds that few timers exceed: quantile ``LONG_DELAY`` of the latest ones."""
        return self._delays_s.at(LONG_DELAY)

    def watch(self, until: float) -> None:
        """Measure from now until at least ``until``, in seconds of the clock."""
        self._until = max(self._until, until)
        if self._due_at is None:
            self._arm()

    def _arm(self) -> None:
        self._due_at = self._clock.now() + EVERY_S
        self._clock.call_at(self._due_at, self._woke)

    def _woke(self) -> None:
        assert self._due_at is not None
        now = self._clock.now()
        delay_s, self._due_at = max(0.0, now - self._due_at), None
        if delay_s < _ASLEEP_S:
            self._delays_s.add(delay_s)
        if now < self._until:
            self._arm()
