"""Tiers of the queue: background work last, interactive before batch; each in order by tenant."""

from bisect import bisect_left, insort
from enum import IntEnum
from typing import NamedTuple


class SortKey(NamedTuple):
    """A place in line: the smallest rank first, then who came first."""

    rank: float
    arrival: int


class Tier(IntEnum):
    """Classes of waiting work, in the order in which they leave."""

    INTERACTIVE = 0
    BATCH = 1
    BACKGROUND = 2
    BACKGROUND_BATCH = 3


TIERS = tuple(Tier)
BATCH_FIRST = (Tier.BATCH, Tier.INTERACTIVE, Tier.BACKGROUND, Tier.BACKGROUND_BATCH)
BATCH_TIERS = (Tier.BATCH, Tier.BACKGROUND_BATCH)
INTERACTIVE_TIERS = (Tier.INTERACTIVE, Tier.BACKGROUND)
BACKGROUND_TIERS = (Tier.BACKGROUND, Tier.BACKGROUND_BATCH)


class TierQueue:
    """One tier: every tenant's keys in order, and the tenants in order of their first keys."""

    def __init__(self) -> None:
        self.keys: dict[str, list[SortKey]] = {}
        self.heads: list[tuple[SortKey, str]] = []
        self.size = 0

    def add(self, tenant: str, key: SortKey) -> None:
        keys = self.keys.setdefault(tenant, [])
        before = keys[0] if keys else None
        insort(keys, key)
        self.size += 1
        self._head_changed(tenant, before)

    def discard(self, tenant: str, key: SortKey) -> None:
        keys = self.keys[tenant]
        before = keys[0]
        del keys[bisect_left(keys, key)]
        self.size -= 1
        self._head_changed(tenant, before)
        if not keys:
            del self.keys[tenant]

    def before(self, key: SortKey) -> int:
        """How many keys are smaller than ``key``."""
        return sum(bisect_left(keys, key) for keys in self.keys.values())

    def _head_changed(self, tenant: str, before: SortKey | None) -> None:
        keys = self.keys[tenant]
        after = keys[0] if keys else None
        if before == after:
            return
        if before is not None:
            del self.heads[bisect_left(self.heads, (before, tenant))]
        if after is not None:
            insort(self.heads, (after, tenant))
