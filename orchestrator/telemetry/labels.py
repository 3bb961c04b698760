"""Bounds the label values that clients choose: all beyond a set number become ``other``."""

from collections.abc import Hashable

OTHER = "other"
MAX_TENANTS = 20
MAX_MODELS = 50
"""Limits for tenants and models: each value is a time series of its own, and one for every bucket
of a histogram that has it."""


class BoundedValues:
    """Lets the first ``most`` values through as they are; all that come later are ``other``."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._known: set[Hashable] = set()

    def of(self, value: str) -> str:
        """The label value to use for ``value``: itself, or ``other``."""
        if value in self._known:
            return value
        if len(self._known) >= self._most:
            return OTHER
        self._known.add(value)
        return value
