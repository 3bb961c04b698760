"""The device memory of the clip pipeline, and its limit (SL-3)."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from worker.memory import GIB, LimitedMemory, MemoryGuard, MemoryLimits

media_log = logging.getLogger("tidegate.clips.render")

NO_LIMITS = MemoryLimits()
_ADVICE = (
    "lower TIDEGATE_SLOT__SLOTS, TIDEGATE_SLOT__SIZE or a model's precision, or raise"
    " TIDEGATE_SLOT__MEMORY__HARD_GIB"
)


@dataclass(frozen=True, slots=True)
class Resident:
    """An object that stays in memory while the worker runs."""

    name: str
    bytes: int
    precision: str = ""


def residency_plan(residents: Sequence[Resident]) -> list[str]:
    """A table for the log; the last line is the sum of the others."""
    rows = [
        (f"{each.name} ({each.precision})" if each.precision else each.name, each.bytes)
        for each in residents
    ]
    rows.append(("in all", sum(size for _, size in rows)))
    width = max(len(name) for name, _ in rows)
    return [f"{name:<{width}}  {size / GIB:7.3f} GiB" for name, size in rows]


def clips_within(wanted: int, models_bytes: int, clip_bytes: int, hard_bytes: int) -> int:
    """Maximum number of parallel clips: ``wanted``, or as many as fit in memory with the models, at
    least one. ``hard_bytes``: 0 for no limit."""
    if not hard_bytes:
        return wanted
    slots = max(1, min(wanted, (hard_bytes - models_bytes) // clip_bytes))
    if slots < wanted:
        media_log.warning(
            "%d of %d slots: the models take %.2f of %.2f GiB, and each slot's buffers %.2f; %s",
            slots,
            wanted,
            models_bytes / GIB,
            hard_bytes / GIB,
            clip_bytes / GIB,
            _ADVICE,
        )
    return slots


class CountedMemory:
    """Memory as counted by ``used`` (bytes): on the CPU, the memory in the plan."""

    def __init__(self, used: Callable[[], int]) -> None:
        self.used_bytes = used

    def drop_caches(self) -> None:
        """Do nothing, since there are no caches."""


def clip_guard(meter: LimitedMemory, limits: MemoryLimits = NO_LIMITS) -> MemoryGuard:
    return MemoryGuard(meter, limits, _ADVICE, media_log)
