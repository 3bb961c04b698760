"""Ages of rows, on a clock that goes on at its own pace whatever the wall clock is set to.

Retention by the wall clock would remove everything when that is set forward, and would keep a text
for ever that ended while it was wrong. Within one boot the machine's own clock counts. Across boots
only the wall clock knows how long the machine was off, and it is believed up to a day: after a
longer time off, rows are kept that much longer.
"""

import sqlite3
from collections.abc import Callable

import msgspec

from orchestrator.clock import Boot

MAX_OFF_S = 86_400.0
"""Longest time off between two boots that is believed, in seconds."""


class _Mark(msgspec.Struct, frozen=True):
    age: float
    unix: float
    boot_id: str
    boot_s: float


class AgeClock:
    """A clock that begins as Unix seconds and never jumps. ``load`` it before ``now``."""

    def __init__(self, unix: Callable[[], float], boot: Boot) -> None:
        self._unix = unix
        self._boot = boot
        self._offset: float | None = None
        """Difference between this clock and the boot's seconds; None before ``load``."""

    def now(self) -> float:
        """Seconds on this clock; only differences mean anything."""
        assert self._offset is not None
        return self._boot.now() + self._offset

    def load(self, db: sqlite3.Connection) -> None:
        """Continue from the time stored in ``db``; no effect if the time is known already."""
        if self._offset is not None:
            return
        found = db.execute("SELECT value FROM meta WHERE name = 'age'").fetchone()
        now = self._unix() if found is None else self._after(found[0])
        self._offset = now - self._boot.now()

    def save(self, db: sqlite3.Connection) -> None:
        """Store the time for the next process."""
        mark = _Mark(self.now(), self._unix(), self._boot.id, self._boot.now())
        db.execute("INSERT OR REPLACE INTO meta VALUES ('age', ?)", (msgspec.msgpack.encode(mark),))

    def _after(self, stored: bytes) -> float:
        try:
            mark = msgspec.msgpack.decode(stored, type=_Mark)
        except msgspec.DecodeError:  # without it the wall clock is as good as any
            return self._unix()
        if self._boot.has(mark.boot_id, mark.boot_s):
            return mark.age + self._boot.now() - mark.boot_s
        return mark.age + min(max(self._unix() - mark.unix, 0.0), MAX_OFF_S)
