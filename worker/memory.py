"""Keeps memory within two limits, for the text engine and the slot pipeline (WK-4, SL-3)."""

import logging
from dataclasses import dataclass
from typing import Final, Protocol

from worker.errors import MemoryLimitExceeded

GIB: Final = 2**30


class LimitedMemory(Protocol):
    """The memory that limits apply to."""

    def used_bytes(self) -> int: ...

    def drop_caches(self) -> None:
        """Give back memory that is held only to be used again."""


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Memory limits in bytes, 0 for none."""

    soft_bytes: int = 0
    hard_bytes: int = 0

    @classmethod
    def of(cls, soft_gib: float, hard_gib: float, *, settings: tuple[str, str]) -> "MemoryLimits":
        """Limits in GiB; ``settings`` names both for messages. Raises ``ValueError`` for a soft
        limit beyond the hard one."""
        if hard_gib and soft_gib > hard_gib:
            raise ValueError(
                f"{settings[0]} ({soft_gib:g}) is beyond {settings[1]} ({hard_gib:g}):"
                " it would never warn; lower it"
            )
        return cls(round(soft_gib * GIB), round(hard_gib * GIB))


class MemoryGuard:
    """Compares a meter with limits: the soft one warns once, the hard one raises."""

    def __init__(
        self, meter: LimitedMemory, limits: MemoryLimits, advice: str, log: logging.Logger
    ) -> None:
        """``advice``: what an operator can change, for messages."""
        self.meter = meter
        self.limits = limits
        self._advice = advice
        self._log = log
        self._has_warned = False

    def check(self, ahead_bytes: int = 0, what: str = "") -> None:
        """Check the limits; ``ahead_bytes``, for ``what``, are allocated but may not count yet.

        Raises ``MemoryLimitExceeded`` if dropping caches does not help.
        """
        limits = self.limits
        if not (limits.soft_bytes or limits.hard_bytes):
            return
        used = self.meter.used_bytes() + ahead_bytes
        if limits.hard_bytes and used > limits.hard_bytes:
            self.meter.drop_caches()
            used = self.meter.used_bytes() + ahead_bytes
            if used > limits.hard_bytes:
                shown = _shown(used, limits.hard_bytes)
                raise MemoryLimitExceeded(
                    f"memory hard limit exceeded{_of(what)}: {shown} in use; {self._advice}"
                )
        if limits.soft_bytes and used > limits.soft_bytes and not self._has_warned:
            self._has_warned = True
            shown = _shown(used, limits.soft_bytes)
            self._log.warning(
                "memory soft limit exceeded%s: %s in use; logged once", _of(what), shown
            )


def _shown(used: int, limit: int) -> str:
    return f"{used / GIB:.2f} GiB of {limit / GIB:.2f}"


def _of(what: str) -> str:
    return f" ({what})" if what else ""
