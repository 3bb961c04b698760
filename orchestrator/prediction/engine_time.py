"""The value of engine time: how many more requests one more millisecond would meet."""

import math


class EngineTime:
    """Learns from the endings of a model's requests; recent ones count more."""

    def __init__(self, memory_ms: float) -> None:
        """``memory_ms``: ms of engine time in which an old request's weight decays to 1/e."""
        self._memory_ms = memory_ms
        self._met = self._missed = self._used_ms = 0.0

    def ended(self, used_ms: float, *, met: bool) -> None:
        """Learn from a request that used ``used_ms`` of the engine, 0 if it was refused."""
        kept = math.exp(-used_ms / self._memory_ms)
        self._met = self._met * kept + met
        self._missed = self._missed * kept + (not met)
        self._used_ms = self._used_ms * kept + used_ms

    @property
    def worth(self) -> float:
        """Requests that one more ms would meet: requests met per ms so far, times the share of
        requests that were not met (an estimate of the chance that a request needs the time). 0
        while nothing is known."""
        if not self._used_ms:
            return 0.0
        return self._met / self._used_ms * self._missed / (self._met + self._missed)
