"""Hands what enters and leaves the prefix cache from the engine's thread to one reader.

No lock: a deque's ends are safe to use from two threads. A reader that falls behind gets the whole
state instead of a backlog that grows.
"""

from collections import deque
from collections.abc import Callable, Iterable

from protocol import KvReport

MAX_BACKLOG = 256
"""Most reports that may wait; beyond that a full report takes their place."""


class ReportQueue:
    """A queue of reports: ``put`` on the engine's thread, ``take`` on the reader's. ``held`` lists
    all that is in the cache."""

    def __init__(self, held: Callable[[], Iterable[bytes]]) -> None:
        self._list_held = held
        self._reports: deque[KvReport] = deque()

    def put(self, report: KvReport) -> None:
        """Queue a report, or all that is held where too many wait."""
        if len(self._reports) >= MAX_BACKLOG:
            self._reports.clear()
            report = KvReport(list(self._list_held()), [], full=True)
        self._reports.append(report)

    def take(self) -> list[KvReport]:
        """The reports that were put since the last call, in order."""
        reports = []
        try:
            while self._reports:
                reports.append(self._reports.popleft())
        except IndexError:
            pass  # replaced by a full report this very moment, which is for the next call
        return reports
