"""Passes changes of the prefix cache from the engine's thread to one reader.

It needs no lock: two threads can safely use the two ends of a deque. A reader that falls behind
gets the whole state instead of a growing backlog.
"""

from collections import deque
from collections.abc import Callable, Iterable

from protocol import KvReport

MAX_BACKLOG = 256
"""Maximum number of waiting reports; beyond it, one full report replaces them."""


class ReportQueue:
    """A queue of reports: ``put`` on the engine's thread, ``take`` on the reader's. ``held`` lists
    all blocks in the cache."""

    def __init__(self, held: Callable[[], Iterable[bytes]]) -> None:
        self._list_held = held
        self._reports: deque[KvReport] = deque()

    def put(self, report: KvReport) -> None:
        """Queue a report, or a full report of the cache if too many wait."""
        if len(self._reports) >= MAX_BACKLOG:
            self._reports.clear()
            report = KvReport(list(self._list_held()), [], full=True)
        self._reports.append(report)

    def take(self) -> list[KvReport]:
        """Return the reports put since the last call, in order."""
        reports = []
        try:
            while self._reports:
                reports.append(self._reports.popleft())
        except IndexError:
            pass  # ``put`` just replaced them with a full report; the next call returns it
        return reports
