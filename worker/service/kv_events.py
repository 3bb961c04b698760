"""Reports to lanes what enters and leaves the prefix cache: coalesced, bounded per frame, whole on
request."""

from collections.abc import Iterable

from protocol import KvReport

MAX_HASHES = 8192
"""Most hashes in one frame, 34 bytes each; further ones wait for the next frame."""


class KvMirror:
    """The block hashes that the prefix cache holds, as far as its reports have been read."""

    def __init__(self) -> None:
        self.hashes: dict[bytes, None] = {}

    def apply(self, report: KvReport) -> None:
        if report.full:
            self.hashes = dict.fromkeys(report.added)
            return
        for block_hash in report.evicted:
            self.hashes.pop(block_hash, None)
        self.hashes.update(dict.fromkeys(report.added))


class KvEvents:
    """Changes that one lane has yet to get. A hash that came and went in between is left out."""

    def __init__(self, hashes: Iterable[bytes] = ()) -> None:
        """``hashes`` replace all that the lane's other end knows."""
        self._full = True
        self._added = dict.fromkeys(hashes)
        self._evicted: dict[bytes, None] = {}

    def add(self, report: KvReport) -> None:
        if report.full:
            self._full, self._added, self._evicted = True, dict.fromkeys(report.added), {}
            return
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

    def take(self, most: int = MAX_HASHES) -> KvReport | None:
        """The next report, of at most that many hashes; None when there is nothing new."""
        if not self._full and not self._added and not self._evicted:
            return None
        evicted = _take(self._evicted, most)
        report = KvReport(_take(self._added, most - len(evicted)), evicted, full=self._full)
        self._full = False
        return report


def _take(hashes: dict[bytes, None], most: int) -> list[bytes]:
    taken = list(hashes)[:most]
    for block_hash in taken:
        del hashes[block_hash]
    return taken
