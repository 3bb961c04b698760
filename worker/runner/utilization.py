"""Measures how busy the device's stream is, by timing events around a step now and then (LB-7).

::

    stream   │── step n ──│ idle │── step n+1 ──
             a            b      c                  utilization = (b - a) / (c - a)
"""

from collections.abc import Callable
from typing import Final, Protocol

_EVERY: Final = 32
_SMOOTHING: Final = 1 / 8


class TimingEvent(Protocol):
    """The interface of ``torch.cuda.Event(enable_timing=True)``."""

    def record(self) -> None: ...

    def query(self) -> bool:
        """Whether the stream has passed this event."""

    def elapsed_time(self, end_event: "TimingEvent") -> float:
        """Milliseconds from this event to ``end_event``."""


class StreamMeter:
    """Samples a stream's utilization. Called around the launch of each step; never waits."""

    def __init__(self, make_event: Callable[[], TimingEvent] | None) -> None:
        """``make_event`` is None where there is no stream; nothing is measured then."""
        self.utilization = 0.0
        """Share of time, 0 to 1, a moving average; 0 until measured."""
        self._make_event = make_event
        self._steps = 0
        self._marks: list[TimingEvent] = []

    def begin(self) -> None:
        """Note that the step's first work is about to be queued."""
        if self._make_event is None:
            return
        self._steps += 1
        if len(self._marks) == 2:
            self._mark()
        elif len(self._marks) == 3 and self._marks[2].query():
            self._read()
        if self._steps % _EVERY == 1 and not self._marks:
            self._mark()

    def end(self) -> None:
        """Note that all of the step's work has been queued."""
        if len(self._marks) == 1:
            self._mark()

    def _mark(self) -> None:
        assert self._make_event is not None
        event = self._make_event()
        event.record()
        self._marks.append(event)

    def _read(self) -> None:
        start, end, following = self._marks
        self._marks = []
        period_ms = start.elapsed_time(following)
        if period_ms > 0:
            share = min(1.0, start.elapsed_time(end) / period_ms)
            self.utilization += (share - self.utilization) * (
                _SMOOTHING if self.utilization else 1.0
            )
