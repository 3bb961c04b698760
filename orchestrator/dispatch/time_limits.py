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
"""Seconds between two looks at the loop's delay: a tenth of a percent of its time."""
_WINDOW = 64
"""Looks that count: those of the last 1.3 seconds."""


class LoopDelay:
    """Measures the event loop's delay while asked to, for texts that must leave before their
    deadline. Where others take the processors, the loop and the client wake up some ms late."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._delays_s = deque([0.0], maxlen=_WINDOW)
        self._until = 0.0
        self._due_at: float | None = None

    @property
    def longest_s(self) -> float:
        """The longest of the latest delays."""
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
"""Quantile of the round trips to a worker that a clean end allows for. After a longer one the text
ends here, as far as it has come: just as punctual, and only what a worker held back is missing."""
MAX_SHARE = 0.1
"""Largest share of its time that a clean end gives up for the way to the worker and back, and for
delays of the event loop."""
RETURN_MARGIN_S: Final = 0.005
"""How long before their deadline answers that end cleanly at it (``partial``, ``fit``) are sent, to
leave time for the client."""


@dataclass(frozen=True, slots=True)
class TimeLimits:
    """How ends are timed, in seconds."""

    return_margin_s: float
    """How long before the deadline a text cut at it leaves, so that its client has it in time."""
    loop_delay: LoopDelay | None = None
    """Measures the event loop's delay; None if the loop is never late, as in a simulator."""

    def ends_at(self, task: Task, now: float) -> float:
        if self.lacks_first_token(task, now):
            return task.parts.cut_at  # workers do not know it: they get no grace
        ends_at = self._cut_at(task, now)
        keeps_text = task.job.on_deadline is not OnDeadline.ERROR and task.has_text
        if task.attempt is not None and task.deadline.at <= now and not keeps_text:
            ends_at += REPORT_GRACE_S
        return ends_at

    def lacks_first_token(self, task: Task, now: float) -> bool:
        return not task.completion_tokens and task.parts.cut_at < self._cut_at(task, now)

    def budget_ms(self, task: Task, instance: Instance, now: float) -> float:
        """Milliseconds that the worker may take; less the way back if it ends texts cleanly."""
        left_ms = task.deadline.left_ms(now)
        if task.job.on_deadline is OnDeadline.ERROR:
            return left_ms
        way_ms = at_share(sorted(instance.round_trip_ms), USUAL_ROUND_TRIP)
        kept_ms = min(way_ms, MAX_SHARE * left_ms) + 1000 * self._margin_s(task)
        return max(left_ms / 2, left_ms - kept_ms)

    def _margin_s(self, task: Task) -> float:
        """Seconds before its deadline that a text leaves which must reach its client by then."""
        if self.loop_delay is None:
            return self.return_margin_s
        given_s = task.deadline.at - task.job.arrived
        # A loop that is late is so twice: when it sends the text, and when its client reads it.
        delay_s = min(2 * self.loop_delay.longest_s, MAX_SHARE * given_s)
        return self.return_margin_s + delay_s

    def _cut_at(self, task: Task, now: float) -> float:
        """The deadline, or earlier for a text that is to reach its client by then."""
        at = task.deadline.at
        if task.job.on_deadline is OnDeadline.ERROR:
            return at
        early = at - self._margin_s(task)
        return early if task.completion_tokens or now < early else at
