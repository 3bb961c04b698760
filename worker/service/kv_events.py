"""What lanes are told of the prefix cache: coalesced, bounded per frame, and whole on request."""

from collections.abc import Iterable

from worker.protocol import CacheReport

MAX_NAMES = 8192
"""Names in one frame, 34 bytes each; what is over waits for the next one."""


class CacheView:
    """The names that the prefix cache holds, as far as its reports have been read."""

    def __init__(self) -> None:
        self.names: dict[bytes, None] = {}

    def apply(self, report: CacheReport) -> None:
        if report.full:
            self.names = dict.fromkeys(report.added)
            return
        for name in report.evicted:
            self.names.pop(name, None)
        self.names.update(dict.fromkeys(report.added))


class CacheNews:
    """What one lane has yet to be told. A name that came and went in between is not mentioned."""

    def __init__(self, names: Iterable[bytes] = ()) -> None:
        """``names`` replace all that the other end knows."""
        self._full = True
        self._added = dict.fromkeys(names)
        self._evicted: dict[bytes, None] = {}

    def add(self, report: CacheReport) -> None:
        if report.full:
            self._full, self._added, self._evicted = True, dict.fromkeys(report.added), {}
            return
        for name in report.evicted:
            if name in self._added:
                del self._added[name]
            else:
                self._evicted[name] = None
        for name in report.added:
            if name in self._evicted:
                del self._evicted[name]
            else:
                self._added[name] = None

    def take(self, most: int = MAX_NAMES) -> CacheReport | None:
        """The next report, of at most that many names; None when there is nothing to tell."""
        if not self._full and not self._added and not self._evicted:
            return None
        evicted = _take(self._evicted, most)
        report = CacheReport(_take(self._added, most - len(evicted)), evicted, full=self._full)
        self._full = False
        return report


def _take(names: dict[bytes, None], most: int) -> list[bytes]:
    taken = list(names)[:most]
    for name in taken:
        del names[name]
    return taken
