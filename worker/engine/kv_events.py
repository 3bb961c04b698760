"""Passes changes of the prefix cache from the engine's thread to readers on another one."""

import threading
from collections.abc import Iterable

from protocol import KvReport


class KvEvents:
    """Changes that a reader has not taken yet, without hashes both added and removed since, so that
    no backlog grows. Any thread."""

    def __init__(self, hashes: Iterable[bytes] | None = None) -> None:
        """``hashes`` replace all that the reader knows."""
        self._lock = threading.Lock()
        self._full = hashes is not None
        self._added = dict.fromkeys(hashes or ())
        self._evicted: dict[bytes, None] = {}

    def add(self, report: KvReport) -> None:
        with self._lock:
            if report.full:
                self._full, self._added, self._evicted = True, {}, {}
            for block_hash in report.evicted:
                if block_hash in self._added:
                    del self._added[block_hash]
                else:
                    self._evicted[block_hash] = None
            for block_hash in report.added:
                if block_hash in self._evicted:
                    del self._evicted[block_hash]
                else:
                    self._added[block_hash] = None

    def take(self, most: int | None = None) -> KvReport | None:
        """The next report, with at most ``most`` hashes; None if nothing is new."""
        with self._lock:
            if not self._full and not self._added and not self._evicted:
                return None
            evicted = _take(self._evicted, most)
            added = _take(self._added, None if most is None else most - len(evicted))
            report = KvReport(added, evicted, full=self._full)
            self._full = False
            return report


def _take(hashes: dict[bytes, None], most: int | None) -> list[bytes]:
    taken = list(hashes)[:most]
    for block_hash in taken:
        del hashes[block_hash]
    return taken
