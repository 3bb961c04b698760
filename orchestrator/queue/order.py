"""Scheduling policies that an operator may choose; the first in each class is the default.

docs/extending.md says how to add an order of the queue.
"""

from bisect import bisect_left, insort
from enum import IntEnum, StrEnum, auto
from typing import Final, NamedTuple, Protocol

from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.job import Priority


class SortKey(NamedTuple):
    """A place in line: the smallest rank first, then who came first."""

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
    """How the next waiting task is chosen. ``slack`` is Tidegate's own; the others are there for
    comparison, and ``fifo`` ignores classes as well."""

    SLACK = "slack"
    DEADLINE = "deadline"
    FIFO = "fifo"


class RowPolicy(StrEnum):
    """How many rows an instance runs at once."""

    ADAPTIVE = "adaptive"
    """The number of rows that meets the most deadlines (``dispatch.rows``)."""
    FIXED = "fixed"
    """The number of slots that the instance's worker has."""


class QueuePolicy(StrEnum):
    """What happens to work that finds the queue full."""

    REJECT = "reject"
    DROP_LRU = "drop-lru"
    """The batch task that has waited longest makes room."""


class Waiting(Protocol):
    """What an order may look at in a task that waits. Times are seconds of the clock."""

    @property
    def deadline(self) -> Deadline: ...
    @property
    def priority(self) -> Priority: ...
    @property
    def tenant(self) -> str: ...
    @property
    def rank(self) -> float:
        """How urgent it is by what is predicted of it (``prediction.urgency``): smallest first."""

    @property
    def is_background(self) -> bool:
        """Whether it has next to no chance of being in time."""


class Place(NamedTuple):
    """A task's place: ``tier`` after tier, in a tier the tenants in turn, of a tenant's tasks the
    one of the smallest ``rank``, of equal ones who came first."""

    tier: Tier
    tenant: str
    rank: float


class Order(Protocol):
    """An order of the queue. It keeps nothing: a task that changes is placed again."""

    @property
    def makes_room(self) -> bool:
        """Whether tasks that wait in a full queue may lose their places to others."""

    def place_of(self, task: Waiting) -> Place: ...


class SlackOrder:
    """Tidegate's own: most urgent first, and hopeless work after all other."""

    makes_room = True

    def place_of(self, task: Waiting) -> Place:
        is_batch = task.priority is Priority.BATCH
        tier = Tier.BATCH if is_batch else Tier.INTERACTIVE
        if task.is_background:
            tier = Tier.BACKGROUND_BATCH if is_batch else Tier.BACKGROUND
        return Place(tier, task.tenant, task.rank)


class DeadlineOrder:
    """Earliest deadline first within a class, whatever the work takes."""

    makes_room = True

    def place_of(self, task: Waiting) -> Place:
        tier = Tier.BATCH if task.priority is Priority.BATCH else Tier.INTERACTIVE
        return Place(tier, task.tenant, task.deadline.at)


class FifoOrder:
    """First come, first served, for every client."""

    makes_room = False

    def place_of(self, task: Waiting) -> Place:
        return Place(Tier.INTERACTIVE, "", 0.0)


ORDERS: Final[dict[QueueOrder, Order]] = {
    QueueOrder.SLACK: SlackOrder(),
    QueueOrder.DEADLINE: DeadlineOrder(),
    QueueOrder.FIFO: FifoOrder(),
}
