"""Measures how long each phase of a start takes; some overlap (LB-6). No torch."""

import time
from collections.abc import Iterator
from contextlib import contextmanager


class LoadTiming:
    """Milliseconds by phase, in the order in which phases ended. For any thread."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self.ms: dict[str, float] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Time the ``with`` block as phase ``name``."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.ms[name] = (time.monotonic() - begun) * 1e3

    def total_ms(self) -> float:
        """Milliseconds since the start."""
        return (time.monotonic() - self._begun) * 1e3

    def __str__(self) -> str:
        return ", ".join(f"{name} {ms:.0f}" for name, ms in self.ms.items())
