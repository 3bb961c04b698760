"""Quantiles over a sliding window that forgets old values once new ones differ from them."""

from bisect import bisect_left, bisect_right, insort
from collections import deque
from collections.abc import Iterable

_WINDOW = 256
_LATEST = 6
"""Number of values that are kept when the others are forgotten; newer ones are compared with what
was before these, so that a change is not its own measure."""
_FEWEST = 4
_RANK_SMOOTHING = 1 / 12
_SURPRISE = 0.25
"""Distance of the latest values' mean rank from the middle that is no chance: over four sigma."""


class Quantiles:
    """Quantiles over a sliding window of values; starts from a prior that newer values push out.

    Values that keep coming from one end of the window belong to another time: a machine has become
    busy, or is no longer. After about ten of them all earlier values are forgotten, whichever the
    end.
    """

    def __init__(self, prior: Iterable[float], size: int = _WINDOW) -> None:
        self._recent = deque(prior)
        self._sorted = sorted(self._recent)
        self._older = list(self._sorted)
        """All values but the ``_LATEST`` that were added last, sorted."""
        self._size = size
        self._mean_rank = 0.5
        self.observed = 0

    def add(self, value: float) -> None:
        """Count a value; the oldest goes once the window is full (the prior counts as oldest)."""
        self.observed += 1
        self._mean_rank += _RANK_SMOOTHING * (self._rank(value) - self._mean_rank)
        self._recent.append(value)
        insort(self._sorted, value)
        if self.observed > _LATEST:
            insort(self._older, self._recent[-1 - _LATEST])
        keeps = self._size
        if abs(self._mean_rank - 0.5) > _SURPRISE:
            keeps, self._mean_rank = min(self._size, _LATEST), 0.5
        for _ in range(len(self._recent) - keeps):
            oldest = self._recent.popleft()
            del self._sorted[bisect_left(self._sorted, oldest)]
            if self._older:
                del self._older[bisect_left(self._older, oldest)]

    @property
    def count(self) -> int:
        return len(self._sorted)

    def at(self, share: float) -> float:
        """The value below which ``share`` of the window lies, interpolated linearly."""
        place = share * (len(self._sorted) - 1)
        low = int(place)
        if low + 1 >= len(self._sorted):
            return self._sorted[-1]
        part = place - low
        return self._sorted[low] * (1 - part) + self._sorted[low + 1] * part

    def _rank(self, value: float) -> float:
        """The share of older values below ``value``, counting half of the equal ones; 0.5 while
        they are too few to tell."""
        older = self._older
        if len(older) < _FEWEST:
            return 0.5
        return (bisect_left(older, value) + bisect_right(older, value)) / (2 * len(older))
