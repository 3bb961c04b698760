"""Quantiles over a sliding window."""

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable

_WINDOW = 256


class Quantiles:
    """Quantiles over a sliding window of values; starts from a prior that newer values push out."""

    def __init__(self, prior: Iterable[float], size: int = _WINDOW) -> None:
        self._recent = deque(prior)
        self._sorted = sorted(self._recent)
        self._size = size
        self.observed = 0

    def add(self, value: float) -> None:
        """Count a value; the oldest goes once the window is full (the prior counts as oldest)."""
        self.observed += 1
        self._recent.append(value)
        insort(self._sorted, value)
        surplus = len(self._recent) - self._size
        for _ in range(surplus):
            oldest = self._recent.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]

    def at(self, share: float) -> float:
        """The value below which ``share`` of the window lies, between neighbours linearly."""
        place = share * (len(self._sorted) - 1)
        low = int(place)
        if low + 1 >= len(self._sorted):
            return self._sorted[-1]
        part = place - low
        return self._sorted[low] * (1 - part) + self._sorted[low + 1] * part

    def rank(self, value: float) -> float:
        """The share of the window below ``value``."""
        return bisect_left(self._sorted, value) / len(self._sorted)
