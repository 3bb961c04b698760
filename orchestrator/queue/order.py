"""Scheduling policies that an operator may choose; the first in each class is the default.

docs/extending.md says how to add an order of the queue.
"""

from bisect import bisect_left, insort
from enum import IntEnum, StrEnum, auto
from typing import Final, NamedTuple, Protocol

from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.job import Priority


class SortKey(NamedTuple):
    """A place in the queue: smallest rank first, then earliest arrival."""

    rank: float
    arrival: int


class Tier(IntEnum):
    """Classes of waiting work, in the order in which they leave."""

    INTERACTIVE = auto()
    BATCH = auto()
    BACKGROUND = auto()
    BACKGROUND_BATCH = auto()


TIERS = tuple(Tier)
BATCH_FIRST = (Tier.BATCH, Tier.INTERACTIVE, Tier.BACKGROUND, Tier.BACKGROUND_BATCH)
BATCH_TIERS = (Tier.BATCH, Tier.BACKGROUND_BATCH)
INTERACTIVE_TIERS = (Tier.INTERACTIVE, Tier.BACKGROUND)
BACKGROUND_TIERS = (Tier.BACKGROUND, Tier.BACKGROUND_BATCH)


class TierQueue:
    """One tier: each tenant's keys in order, and the tenants in the order of their first keys."""

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


class QueueOrder(StrEnum):
    """Orders of the queue. ``slack`` is Tidegate's own; the others are for comparison, and ``fifo``
    also ignores classes."""

    SLACK = "slack"
    DEADLINE = "deadline"
    FIFO = "fifo"


class RowPolicy(StrEnum):
    """Policies for the number of rows that an instance runs at once."""

    ADAPTIVE = "adaptive"
    """The number of rows that meets the most deadlines (``dispatch.rows``)."""
    FIXED = "fixed"
    """The number of slots that the instance's worker has."""


class QueuePolicy(StrEnum):
    """Policies for work that arrives at a full queue."""

    REJECT = "reject"
    DROP_LRU = "drop-lru"
    """The longest-waiting batch task makes room."""


class Waiting(Protocol):
    """The fields of a waiting task that an order may read. Times are seconds of the clock."""

    @property
    def deadline(self) -> Deadline: ...
    @property
    def priority(self) -> Priority: ...
    @property
    def tenant(self) -> str: ...
    @property
    def rank(self) -> float:
        """Its predicted urgency (``prediction.urgency``): the smallest rank leaves first."""

    @property
    def is_background(self) -> bool:
        """Whether it has almost no chance of being in time."""


class Place(NamedTuple):
    """A task's place. Tiers leave in order, and tenants take turns in a tier. Among a tenant's
    tasks the smallest ``rank`` leaves first, then the earliest arrival."""

    tier: Tier
    tenant: str
    rank: float


class Order(Protocol):
    """An order of the queue. It is stateless: a task that changes is placed again."""

    @property
    def makes_room(self) -> bool:
        """Whether waiting tasks in a full queue may lose their places to others."""

    def place_of(self, task: Waiting) -> Place: ...


class SlackOrder:
    """Tidegate's own order: most urgent first, and hopeless work last."""

    makes_room = True

    def place_of(self, task: Waiting) -> Place:
        is_batch = task.priority is Priority.BATCH
        tier = Tier.BATCH if is_batch else Tier.INTERACTIVE
        if task.is_background:
            tier = Tier.BACKGROUND_BATCH if is_batch else Tier.BACKGROUND
        return Place(tier, task.tenant, task.rank)


class DeadlineOrder:
    """Earliest deadline first within a class, regardless of the amount of work."""

    makes_room = True

    def place_of(self, task: Waiting) -> Place:
        tier = Tier.BATCH if task.priority is Priority.BATCH else Tier.INTERACTIVE
        return Place(tier, task.tenant, task.deadline.at)


class FifoOrder:
    """First come, first served, for all clients together."""

    makes_room = False

    def place_of(self, task: Waiting) -> Place:
        return Place(Tier.INTERACTIVE, "", 0.0)


ORDERS: Final[dict[QueueOrder, Order]] = {
    QueueOrder.SLACK: SlackOrder(),
    QueueOrder.DEADLINE: DeadlineOrder(),
    QueueOrder.FIFO: FifoOrder(),
}
