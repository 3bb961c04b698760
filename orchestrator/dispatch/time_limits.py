"""Decides when a task ends here, and how long its worker may take (DL-6, DL-14)."""

from collections import deque
from dataclasses import dataclass
from typing import Final

from orchestrator.clock import Clock
from orchestrator.instances.instance import Instance
from orchestrator.prediction.forecast import at_share
from orchestrator.tasks.deadline import REPORT_GRACE_S
from orchestrator.tasks.task import Task
from protocol import OnDeadline

EVERY_S = 0.02
"""Seconds between measurements of the loop's delay, which take a tenth of a percent of its time."""
_WINDOW = 64
"""Number of measurements that count: those of the last 1.3 seconds."""


class LoopDelay:
    """Measures the event loop's delay on request, for texts that must leave before their deadline.
    If other processes use the processors, the loop and the client wake up some ms late."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._delays_s = deque([0.0], maxlen=_WINDOW)
        self._until = 0.0
        self._due_at: float | None = None

    @property
    def longest_s(self) -> float:
        """The longest of the recent delays, in seconds."""
        return max(self._delays_s)

    def watch(self, until: float) -> None:
        """Measure from now until at least ``until``, in seconds of the clock."""
        self._until = max(self._until, until)
        if self._due_at is None:
            self._arm()

    def _arm(self) -> None:
        self._due_at = self._clock.now() + EVERY_S
        self._clock.call_at(self._due_at, self._woke)

    def _woke(self) -> None:
        assert self._due_at is not None
        now = self._clock.now()
        self._delays_s.append(max(0.0, now - self._due_at))
        self._due_at = None
        if now < self._until:
            self._arm()


USUAL_ROUND_TRIP = 0.75
"""Quantile of a worker's round trips that a clean end allows for. After a longer round trip the
text so far ends here: also in time, and it lacks only the text that the worker held back."""
MAX_SHARE = 0.1
"""Largest share of a request's time that a clean end reserves for the round trip to the worker and
for delays of the event loop."""
RETURN_MARGIN_S: Final = 0.005
"""Seconds before the deadline at which answers that end cleanly (``partial``, ``fit``) are sent, to
leave time for the client."""


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """Settings for the times of ends, in seconds."""

    return_margin_s: float
    """Seconds before the deadline at which a cut text leaves, to reach its client in time."""
    loop_delay: LoopDelay | None = None
    """Measures the event loop's delay; None if the loop is never late, as in a simulator."""

    def ends_at(self, task: Task, now: float) -> float:
        if self.lacks_first_token(task, now):
            return task.parts.cut_at  # workers do not know this deadline: no grace period
        ends_at = self._cut_at(task, now)
        keeps_text = task.job.on_deadline is not OnDeadline.ERROR and task.has_text
        if task.attempt is not None and task.deadline.at <= now and not keeps_text:
            ends_at += REPORT_GRACE_S
        return ends_at

    def lacks_first_token(self, task: Task, now: float) -> bool:
        return not task.completion_tokens and task.parts.cut_at < self._cut_at(task, now)

    def budget_ms(self, task: Task, instance: Instance, now: float) -> float:
        """Milliseconds that the worker may take, minus the way back if it ends texts cleanly."""
        left_ms = task.deadline.left_ms(now)
        if task.job.on_deadline is OnDeadline.ERROR:
            return left_ms
        way_ms = at_share(sorted(instance.round_trip_ms), USUAL_ROUND_TRIP)
        kept_ms = min(way_ms, MAX_SHARE * left_ms) + 1000 * self._margin_s(task)
        return max(left_ms / 2, left_ms - kept_ms)

    def _margin_s(self, task: Task) -> float:
        """Seconds before its deadline at which a text that must arrive in time leaves."""
        if self.loop_delay is None:
            return self.return_margin_s
        given_s = task.deadline.at - task.job.arrived
        # A late loop delays twice: when it sends the text, and when the client reads it.
        delay_s = min(2 * self.loop_delay.longest_s, MAX_SHARE * given_s)
        return self.return_margin_s + delay_s

    def _cut_at(self, task: Task, now: float) -> float:
        """The deadline, or earlier for a text that must reach its client by then."""
        at = task.deadline.at
        if task.job.on_deadline is OnDeadline.ERROR:
            return at
        early = at - self._margin_s(task)
        return early if task.completion_tokens or now < early else at
