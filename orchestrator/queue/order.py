"""What an operator may choose of scheduling; the default is first in each."""

from enum import StrEnum


class QueueOrder(StrEnum):
    """``slack`` is ours. The others are there to compare with; ``fifo`` knows no classes either."""

    SLACK = "slack"
    DEADLINE = "deadline"
    FIFO = "fifo"


class RowPolicy(StrEnum):
    """How many rows an instance runs at once."""

    ADAPTIVE = "adaptive"
    """As many as meet the most deadlines (``prediction.batch_size``)."""
    FIXED = "fixed"
    """As many as its worker has slots for."""


class QueuePolicy(StrEnum):
    """What becomes of work that finds the queue full."""

    REJECT = "reject"
    DROP_LRU = "drop-lru"
    """The batch task that has waited longest makes room."""
