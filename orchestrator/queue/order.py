"""Scheduling policies that an operator may choose; the first in each class is the default.

docs/extending.md says how to add an order of the queue.
"""

from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from orchestrator.queue.tiers import Tier
from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.job import Priority


class QueueOrder(StrEnum):
    """How the next waiting task is chosen. ``slack`` is Tidegate's own; the others are there for
    comparison, and ``fifo`` ignores classes as well."""

    SLACK = "slack"
    DEADLINE = "deadline"
    FIFO = "fifo"


class RowPolicy(StrEnum):
    """How many rows an instance runs at once."""

    ADAPTIVE = "adaptive"
    """The number of rows that meets the most deadlines (``prediction.batch_size``)."""
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
    """An order of the queue. It keeps nothing: a task that changes is placed anew."""

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
    """First come, first served, whoever it is."""

    makes_room = False

    def place_of(self, task: Waiting) -> Place:
        return Place(Tier.INTERACTIVE, "", 0.0)


ORDERS: Final[dict[QueueOrder, Order]] = {
    QueueOrder.SLACK: SlackOrder(),
    QueueOrder.DEADLINE: DeadlineOrder(),
    QueueOrder.FIFO: FifoOrder(),
}
