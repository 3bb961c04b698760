"""Predicts when waiting work will start, and when the queue will have room (DL-16).

Known are the jobs that run, how far each of them is and how long such answers get, which tasks wait
ahead, and when these give up. Not known is which more urgent tasks will come, and which jobs will
be paused; how far that has moved starts of late is learnt, as a ratio.
"""

import math
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import Protocol

from orchestrator.clock import Clock
from orchestrator.prediction.forecaster import PROMISE_SLACK_MS, Forecaster
from orchestrator.prediction.quantiles import Quantiles
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.tasks.task import Task

_FEW = 4
"""How many of the likely times of each job that has yet to start are used."""


def start_ms(
    running: Iterable[Sequence[float]], ahead: Sequence[Sequence[float]], free: int
) -> float:
    """When work behind ``ahead`` will start, in ms from now: the middle of its likely times.

    Each of ``running`` and ``ahead`` is a list of equally likely times for which one job has its
    place. ``free`` places are free now; negative if more has been sent than runs at once.

    The n-th place is free when n − ½ are to be expected: the jobs' distributions are added up, and
    with one job alone that is its median. 0 if nothing runs.
    """
    releases = [(ms, 1 / len(times)) for times in running for ms in times]
    heapify(releases)
    now_ms, wanted, expected = 0.0, 0.5 - free, 0.0
    for times in (*ahead, ()):
        while expected < wanted and releases:
            now_ms, share = heappop(releases)
            expected += share
        if not times:
            break
        wanted += 1
        few = times[len(times) // (2 * _FEW) :: max(1, len(times) // _FEW)]
        for ms in few:
            heappush(releases, (now_ms + ms, 1 / len(few)))
    return now_ms


MAX_AHEAD = 48
"""Waiting tasks that are gone through one by one; later ones are taken to start at that rate."""
_EVERY = 2
"""One waiting task in this many is predicted to learn from, whether or not its client asks."""
_PAUSE_S = 0.05
"""Least seconds between two predictions to learn from: one takes a millisecond."""
_MIN_MS = 10.0
"""Waits shorter than this are matters of luck, and teach nothing."""
_WINDOW = 48
_PARTS = 4
_MAX_RATIO = math.log(4.0)
_SHARES = (0.1, 0.3, 0.5, 0.7, 0.9)
"""Quantiles that stand for a distribution: a fifth of it each."""


class RunningJob(Protocol):
    """The part of a job on a worker that predictions read."""

    @property
    def task(self) -> Task: ...
    @property
    def is_paused(self) -> bool: ...


class StartTimes:
    """Predicts when tasks start, and learns from those that did."""

    def __init__(
        self,
        queue: TaskQueue[Task],
        forecaster: Forecaster,
        running: Iterable[RunningJob],
        clock: Clock,
    ) -> None:
        """``running`` iterates all jobs on workers, as they are at that moment."""
        self._queue = queue
        self._forecaster = forecaster
        self._running = running
        self._clock = clock
        self._ratios = [Quantiles([0.0] * 5, _WINDOW) for _ in range(_PARTS)]
        """Learnt ratios by place in the queue: few tasks come to stand before its first, many
        before its last."""
        self._room_ratios = Quantiles([0.0] * 5, _WINDOW)
        self._predicted_room: tuple[float, float] | None = None
        self._seen = 0
        self._next_at = 0.0

    def start_ms(self, task: Task) -> float:
        """Ms from now until ``task`` starts, whether it is in the queue already or would be now."""
        plain_ms, part = self._plain_start_ms(task)
        start_ms = plain_ms * math.exp(self._ratios[part].at(0.5))
        latest_ms = self._forecaster.latest_start_ms(task, self._clock.now())
        if task.is_promised:  # kept, but no sooner than it has to be
            return max(min(plain_ms, latest_ms), latest_ms - PROMISE_SLACK_MS)
        return min(start_ms, max(latest_ms, _MIN_MS)) if task in self._queue else start_ms

    def likely_ms(self, task: Task) -> tuple[float, ...]:
        """Equally likely times in ms from now until ``task`` starts, as any other task, rising."""
        plain_ms, part = self._plain_start_ms(task)
        if not plain_ms:
            return (0.0,)
        return tuple(plain_ms * math.exp(self._ratios[part].at(share)) for share in _SHARES)

    def room_ms(self, model: str) -> float:
        """Ms from now until the queue has room for one more task: one starts, or gives up."""
        now = self._clock.now()
        residuals, free = self._residuals(model, now)
        first_ms = start_ms(residuals, (), free) if residuals else _MIN_MS
        leaves_at = self._queue.next_expiry
        if leaves_at is not None:
            first_ms = min(first_ms, 1000 * (leaves_at - now))
        first_ms = max(1.0, first_ms)
        if self._predicted_room is None:
            self._predicted_room = now, first_ms
        return first_ms * math.exp(self._room_ratios.at(0.5))

    # ── learning ─────────────────────────────────────────────────────────────────────────────

    def queue_changed(self) -> None:
        """Learn from the queue having room again; to be called whenever it may have."""
        if self._predicted_room is None or self._queue.full:
            return
        at, predicted_ms = self._predicted_room
        self._predicted_room = None
        self._room_ratios.add(_log_ratio(1000 * (self._clock.now() - at), predicted_ms))

    def queued(self, task: Task) -> None:
        self._seen += 1
        now = self._clock.now()
        if self._seen % _EVERY == 0 and now >= self._next_at and not task.is_promised:
            self._next_at = now + _PAUSE_S
            task.predicted_start = (now, *self._plain_start_ms(task))

    def started(self, task: Task) -> None:
        if task.predicted_start is None:
            return
        at, predicted_ms, part = task.predicted_start
        task.predicted_start = None
        took_ms = 1000 * (self._clock.now() - at)
        if min(took_ms, predicted_ms) >= _MIN_MS:
            self._ratios[part].add(_log_ratio(took_ms, predicted_ms))

    # ── inside ───────────────────────────────────────────────────────────────────────────────

    def _plain_start_ms(self, task: Task) -> tuple[float, int]:
        """Ms until ``task`` starts, without what is learnt, and its part of the queue."""
        now = self._clock.now()
        position = self._queue.place_of(task)
        residuals, free = self._residuals(task.model, now)
        part = min(_PARTS - 1, _PARTS * position // (len(self._queue) + 1))
        if position < free:
            return 0.0, part
        ahead = [
            self._forecaster.residual_ms(other, now)
            for other in self._queue.first(min(position, MAX_AHEAD))
            if other.model == task.model
        ]
        whole_ms = start_ms(residuals, ahead, free)
        if position > MAX_AHEAD:
            whole_ms *= (position + 1 - min(0, free)) / (MAX_AHEAD + 1 - min(0, free))
        return whole_ms, part

    def _residuals(self, model: str, now: float) -> tuple[list[tuple[float, ...]], int]:
        """How long each job on workers may keep its place, and how many places are free."""
        residuals = [
            self._forecaster.residual_ms(job.task, now)
            for job in self._running
            if job.task.model == model and not job.is_paused
        ]
        return residuals, self._forecaster.capacity_of(model).places


def _log_ratio(took_ms: float, predicted_ms: float) -> float:
    ratio = math.log(max(1.0, took_ms) / max(1.0, predicted_ms))
    return min(max(ratio, -_MAX_RATIO), _MAX_RATIO)
