"""Keeps memory within a soft and a hard limit, for the text engine and for clips (WK-4, SL-3)."""

import logging
from dataclasses import dataclass
from typing import Final, Protocol

from worker.errors import MemoryLimitExceeded

GIB: Final = 2**30
SOFT_SHARE: Final = 11.0 / 11.5
"""Share of the hard limit above which one warning is logged: 11 GB of the 11.5 GB that clips may
use on a 12 GB card (SL-3)."""


class LimitedMemory(Protocol):
    """The memory that limits apply to."""

    def used_bytes(self) -> int: ...

    def drop_caches(self) -> None:
        """Free memory that is held only for reuse."""


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """The hard limit in bytes (0 for no limit) and the soft limit derived from it."""

    hard_bytes: int = 0

    @classmethod
    def of(cls, hard_gib: float) -> "MemoryLimits":
        """Limits with a hard limit of ``hard_gib`` GiB."""
        return cls(round(hard_gib * GIB))

    @property
    def soft_bytes(self) -> int:
        """Bytes above which one warning is logged."""
        return round(SOFT_SHARE * self.hard_bytes)


class MemoryGuard:
    """Compares a meter with limits: the soft limit warns once, the hard limit raises."""

    def __init__(
        self, meter: LimitedMemory, limits: MemoryLimits, advice: str, log: logging.Logger
    ) -> None:
        """``advice``: tells an operator what to change, for messages."""
        self.meter = meter
        self.limits = limits
        self._advice = advice
        self._log = log
        self._has_warned = False

    def check(self, ahead_bytes: int = 0, what: str = "") -> None:
        """Check the limits. ``ahead_bytes``, for ``what``, are allocated but maybe not counted yet.

        Raises ``MemoryLimitExceeded`` if dropping caches does not help.
        """
        hard, soft = self.limits.hard_bytes, self.limits.soft_bytes
        if not hard:
            return
        used = self.meter.used_bytes() + ahead_bytes
        if used > hard:
            self.meter.drop_caches()
            used = self.meter.used_bytes() + ahead_bytes
        if used <= soft:
            return
        of, limit = f" ({what})" if what else "", hard if used > hard else soft
        shown = f"{of}: {used / GIB:.2f} GiB of {limit / GIB:.2f} in use"
        if used > hard:
            raise MemoryLimitExceeded(f"memory hard limit exceeded{shown}; {self._advice}")
        if not self._has_warned:
            self._has_warned = True
            self._log.warning("memory soft limit exceeded%s; logged once", shown)
