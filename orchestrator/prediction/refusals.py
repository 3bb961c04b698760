"""What ended unserved by our own decision, and how often that was wrong (DL-7, DL-17).

Of every kind of decision a sample is not carried out: that task is kept, and nothing but its
deadline stops it. The share of the sample that is met is the rate of false refusals.
"""

from collections import Counter
from collections.abc import Callable
from enum import StrEnum

from orchestrator.tasks.task import Task
from worker.protocol import Code, End, Outcome

_SMOOTHING = 0.01


class Kind(StrEnum):
    """Where a request can end by our own decision."""

    ADMISSION = "admission"
    """Certain to miss when it came."""
    QUEUE = "queue"
    """Certain to miss while it waited."""
    QUEUE_FULL = "queue_full"
    """There was no room to wait in."""
    DROPPED = "dropped"
    """It made room for newer work."""
    STOPPED = "stopped"
    """Its worker was certain that it would miss."""


class Refusals:
    """Counts decisions, and what became of those that were not carried out."""

    def __init__(self, samples: Callable[[Task], bool] = lambda task: False) -> None:
        """``samples`` draws whether a decision is not carried out."""
        self.samples = samples
        self.infeasible = 0
        self.refused = 0
        self.unserved: Counter[Kind] = Counter()
        """Decisions that were carried out."""
        self.sampled: Counter[tuple[Kind, bool]] = Counter()
        """Those that were not, by whether the task was met after all."""
        self.recent_share = 0.0
        """Of what was offered of late."""

    @property
    def sampled_met(self) -> int:
        return sum(count for (_, met), count in self.sampled.items() if met)

    @property
    def sampled_missed(self) -> int:
        return sum(count for (_, met), count in self.sampled.items() if not met)

    @property
    def false_rate(self) -> float:
        """Share of sampled decisions whose task was met after all; 0 without any."""
        samples = self.sampled.total()
        return self.sampled_met / samples if samples else 0.0

    def keeps(self, task: Task, kind: Kind) -> bool:
        """Whether a decision against ``task`` is to be a sample; counted as carried out if not."""
        if task.refusal_sample or self.samples(task):
            return True
        self.unserved[kind] += 1
        return False

    def keep(self, task: Task, kind: Kind) -> None:
        """``task`` is let through; what it comes to is counted once, for the first decision."""
        if task.refusal_sample:
            return
        task.refusal_sample = True
        task.on_end.append(lambda ended: self._ended(ended, kind))

    def spares(self, task: Task) -> bool:
        """Whether no worker is to stop ``task`` before its deadline."""
        return task.refusal_sample or self.samples(task)

    def stopped(self, task: Task, end: End, now: float) -> None:
        """A worker is done with ``task``: count it if that was a stop, or would have been."""
        if end.spared:
            self.keep(task, Kind.STOPPED)
        elif end.code is Code.DEADLINE_EXCEEDED and task.deadline.left_ms(now) > 0:
            self.unserved[Kind.STOPPED] += 1

    def _ended(self, task: Task, kind: Kind) -> None:
        ending = task.ending
        if ending is None or ending.outcome in (Outcome.ABORTED, Outcome.FAILED):
            return
        self.sampled[kind, ending.outcome in (Outcome.MET, Outcome.PARTIAL)] += 1

    def offered(self, *, refused: bool) -> None:
        self.refused += refused
        self.recent_share += _SMOOTHING * (refused - self.recent_share)

    def refused_late(self) -> None:
        """One that was let in, and counted as such, has to go after all."""
        self.refused += 1
        self.recent_share = min(1.0, self.recent_share + _SMOOTHING)
