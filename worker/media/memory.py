"""What the slot pipeline takes of its device, and the most that it may (SL-3)."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker.errors import MemoryLimitExceeded

media_log = logging.getLogger("tidegate.worker.media")

_GB = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Resident:
    """Something that stays in memory for as long as the worker runs."""

    name: str
    bytes: int
    precision: str = ""


@dataclass(frozen=True, slots=True)
class ResidencyPlan:
    """Everything that stays, and what steps take on top of it."""

    residents: Sequence[Resident]
    workspace_bytes: int
    """Of the stages that run at the same time."""

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.residents) + self.workspace_bytes

    def lines(self) -> list[str]:
        """A table for the log; the last line is the sum of the others."""
        rows = [
            (f"{each.name} ({each.precision})" if each.precision else each.name, each.bytes)
            for each in self.residents
        ]
        rows += [("workspace", self.workspace_bytes), ("in all", self.bytes)]
        width = max(len(name) for name, _ in rows)
        return [f"{name:<{width}}  {size / _GB:7.3f} GB" for name, size in rows]


class MemoryGuard:
    """Compares what is taken with a soft and a hard limit, in bytes; 0 is none.

    ``used`` says what is taken now: ``torch.cuda.memory_allocated``, or on the CPU what the plan
    accounts for.
    """

    def __init__(self, used: Callable[[], int], soft: int = 0, hard: int = 0) -> None:
        if hard and soft > hard:
            raise ValueError(f"the soft limit ({soft}) is beyond the hard one ({hard})")
        self._used = used
        self._soft = soft
        self._hard = hard
        self._has_warned = False

    @property
    def used(self) -> int:
        return self._used()

    @property
    def limits(self) -> tuple[int, int]:
        """Soft and hard."""
        return self._soft, self._hard

    @property
    def free(self) -> int | None:
        """Up to the hard limit; None without one."""
        return max(0, self._hard - self._used()) if self._hard else None

    def check(self, what: str, more: int = 0) -> None:
        """Before ``more`` bytes are taken for ``what``. Raises ``MemoryLimitExceeded``."""
        used = self._used() + more
        if self._hard and used > self._hard:
            raise MemoryLimitExceeded(
                f"{what} would take the slot pipeline to {used / _GB:.2f} GB, and its hard limit is"
                f" {self._hard / _GB:.2f} GB: lower TIDEGATE_SLOT_SLOTS, TIDEGATE_SLOT_SIZE or a"
                " model's precision, or raise TIDEGATE_SLOT_MEMORY_HARD_GB"
            )
        if self._soft and used > self._soft and not self._has_warned:
            self._has_warned = True
            media_log.warning(
                "the slot pipeline takes %.2f GB, more than its soft limit of %.2f GB (%s)",
                used / _GB,
                self._soft / _GB,
                what,
            )
