"""Hands what enters and leaves the prefix cache from the engine's thread to one reader.

No lock: a deque's ends are safe to use from two threads. A reader that falls behind gets the whole
state instead of a backlog that grows.
"""

from collections import deque

from worker.protocol import KvReport
from worker.scheduler.block_pool import BlockPool

MAX_BACKLOG = 256
"""Most reports that may wait; beyond that a full report takes their place."""


class KvEventQueue:
    """A queue of cache changes: ``publish`` on the engine's thread, ``take`` on the reader's."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._reports: deque[KvReport] = deque()

    def publish(self) -> None:
        """Queue what has changed in the prefix cache since the last call."""
        report = self._pool.take_changes()
        if report is None:
            return
        if len(self._reports) >= MAX_BACKLOG:
            self._reports.clear()
            report = KvReport(list(self._pool.hashes), [], full=True)
        self._reports.append(report)

    def take(self) -> list[KvReport]:
        """The reports published since the last call, in order."""
        reports = []
        try:
            while self._reports:
                reports.append(self._reports.popleft())
        except IndexError:
            pass  # replaced by a full report this very moment, which is for the next call
        return reports
