"""Hands what enters and leaves the prefix cache from the engine's thread to one reader.

No lock: a deque's ends are safe to use from two threads. A reader that falls behind gets the whole
state instead of a backlog that grows.
"""

from collections import deque

from worker.protocol import KvReport
from worker.scheduler.block_pool import BlockPool

MAX_BACKLOG = 256
"""Reports that may wait; beyond that a full one takes their place."""


class KvEventQueue:
    """``publish`` on the engine's thread, ``take`` on the reader's."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._reports: deque[KvReport] = deque()

    def publish(self) -> None:
        """Put down what has changed since the last call."""
        report = self._pool.take_changes()
        if report is None:
            return
        if len(self._reports) >= MAX_BACKLOG:
            self._reports.clear()
            report = KvReport(list(self._pool.hashes), [], full=True)
        self._reports.append(report)

    def take(self) -> list[KvReport]:
        """What was put down since the last call, in order."""
        reports = []
        try:
            while self._reports:
                reports.append(self._reports.popleft())
        except IndexError:
            pass  # replaced by a full report this very moment, which is for the next call
        return reports
