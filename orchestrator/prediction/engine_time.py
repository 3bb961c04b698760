"""What engine time is worth: how many more requests would be met with a millisecond of it."""

import math


class EngineTime:
    """Learns from the ends of a model's requests; recent ones count more."""

    def __init__(self, memory_ms: float) -> None:
        """``memory_ms``: ms of engine time after which what was learned counts by 1/e."""
        self._memory_ms = memory_ms
        self._met = self._missed = self._used_ms = 0.0

    def ended(self, used_ms: float, *, met: bool) -> None:
        """Learn from a request that took ``used_ms`` of the engine, 0 where it was refused."""
        kept = math.exp(-used_ms / self._memory_ms)
        self._met = self._met * kept + met
        self._missed = self._missed * kept + (not met)
        self._used_ms = self._used_ms * kept + used_ms

    @property
    def worth(self) -> float:
        """Requests that one more ms would meet: those that a ms met so far, times the chance that
        another request needs it, for which the share of requests not met is taken. 0 while nothing
        is known."""
        if not self._used_ms:
            return 0.0
        return self._met / self._used_ms * self._missed / (self._met + self._missed)
