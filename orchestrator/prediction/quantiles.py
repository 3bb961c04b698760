"""Quantiles over a sliding window."""

from collections import deque
from collections.abc import Iterable


class Quantiles:
    """Quantiles over the last ``size`` values; starts from a prior that newer values push out."""

    def __init__(self, prior: Iterable[float], size: int) -> None:
        self._recent = deque(prior, maxlen=size)

    def add(self, value: float) -> None:
        """Count a value; the oldest goes once the window is full (the prior counts as oldest)."""
        self._recent.append(value)

    def at(self, share: float) -> float:
        """The value below which ``share`` of the window lies, interpolated linearly."""
        values = sorted(self._recent)
        place = share * (len(values) - 1)
        low = int(place)
        if low + 1 >= len(values):
            return values[-1]
        part = place - low
        return values[low] * (1 - part) + values[low + 1] * part
