"""Scheduling policies that an operator may choose; the first in each class is the default."""

from enum import StrEnum


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
