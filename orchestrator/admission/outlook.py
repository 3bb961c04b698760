"""When waiting work will start: what clients are told of the queue (DL-16).

Known are the jobs that run, how far each of them is and how long such answers get, who waits ahead,
and when who waits gives up. What is not known is who will come and be more urgent, and who will be
paused; how far that has moved starts of late is learnt, as a ratio.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import NamedTuple

from orchestrator.clock import Clock
from orchestrator.dispatch.attempt import Attempt
from orchestrator.instances.registry import Registry
from orchestrator.prediction import Quantiles
from orchestrator.prediction.forecaster import PROMISE_SLACK_MS, Forecaster
from orchestrator.prediction.releases import start_ms
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.tasks.task import Task
from worker.protocol import Outcome

MOST_AHEAD = 48
"""Waiting tasks that are looked at one by one; beyond them the same pace is taken to go on."""
_EVERY = 2
"""One in so many tasks that wait is foretold to learn by, told or not."""
_PAUSE_S = 0.05
"""And no sooner than this after the last one: it takes a millisecond."""
_LEAST_MS = 10.0
"""Shorter waits are matters of luck, and teach nothing."""
_WINDOW = 48
_PARTS = 4
_MOST_PROMISES = 4096
_SLOP_MS = 16
"""A deadline that is stated as a time span comes out so much later at most."""
PROMISED_SHARE = 0.5
"""Of the capacity, that promises are made of."""
CLAIM_S = 2.0
"""A promise that nobody came back for by then is void."""
_MOST_RATIO = math.log(4.0)
_LOST = (Outcome.MISSED, Outcome.PARTIAL, Outcome.REFUSED)


class _Promise(NamedTuple):
    work_ms: float
    made_at: float


class Outlook:
    """Tells when tasks will start. ``attempts`` are all jobs on workers."""

    def __init__(
        self, registry: Registry, queue: TaskQueue[Task], forecaster: Forecaster, clock: Clock
    ) -> None:
        self.attempts: Callable[[], Iterable[Attempt]] = tuple
        self._registry = registry
        self._queue = queue
        self._forecaster = forecaster
        self._clock = clock
        self._ratios = [Quantiles([0.0] * 5, _WINDOW) for _ in range(_PARTS)]
        """By place in the queue: few come to stand before its first, many before its last."""
        self._room_ratios = Quantiles([0.0] * 5, _WINDOW)
        self._room_foretold: tuple[float, float] | None = None
        self._seen = 0
        self._next_at = 0.0
        self._promises: OrderedDict[int, _Promise] = OrderedDict()
        self._kept: dict[str, Task] = {}

    # ── what is told ─────────────────────────────────────────────────────────────────────────

    def start_ms(self, task: Task) -> float:
        """From now until ``task`` starts, whether it is in the queue already or would be now."""
        plain_ms, part = self._plain_start_ms(task)
        start_ms = plain_ms * math.exp(self._ratios[part].at(0.5))
        latest_ms = self._forecaster.latest_start_ms(task, self._clock.now())
        if task.is_promised:  # kept, but no sooner than it has to be
            return max(min(plain_ms, latest_ms), latest_ms - PROMISE_SLACK_MS)
        return min(start_ms, max(latest_ms, _LEAST_MS)) if task in self._queue else start_ms

    def room_ms(self, model: str) -> float:
        """From now until the queue has room for one more: one starts, or gives up."""
        now = self._clock.now()
        running, free = self._running(model, now)
        first_ms = start_ms(running, (), free) if running else _LEAST_MS
        leaves_at = self._queue.next_expiry
        if leaves_at is not None:
            first_ms = min(first_ms, 1000 * (leaves_at - now))
        first_ms = max(1.0, first_ms)
        if self._room_foretold is None:
            self._room_foretold = now, first_ms
        return first_ms * math.exp(self._room_ratios.at(0.5))

    # ── promises ─────────────────────────────────────────────────────────────────────────────

    def promised_wait_ms(self) -> float:
        """How long until one more promise can be kept, after those that were made before it.

        Promises get a share of the capacity, so that they can be kept whoever else comes.
        """
        now = self._clock.now()
        while self._promises:
            unix_ms, promise = next(iter(self._promises.items()))
            if now < promise.made_at + CLAIM_S:
                break
            del self._promises[unix_ms]
        work_ms = sum(promise.work_ms for promise in self._promises.values())
        work_ms += sum(task.work_ms for task in self._kept.values())
        ready = sum(instance.ready for instance in self._registry)
        return work_ms / (PROMISED_SHARE * max(1, ready))

    def promise(self, deadline_unix_ms: int, task: Task) -> None:
        """``task``'s client is told that this deadline is feasible."""
        self._promises[deadline_unix_ms] = _Promise(task.work_ms, self._clock.now())
        while len(self._promises) > _MOST_PROMISES:
            self._promises.popitem(last=False)

    def claim(self, task: Task) -> None:
        """See whether ``task`` comes with a deadline that we named; each is good for one task."""
        stated = task.deadline.unix_ms
        for unix_ms in range(stated, stated - _SLOP_MS, -1):
            if self._promises.pop(unix_ms, None) is not None:
                task.is_promised = True
                self._kept[task.id] = task
                task.on_end.append(self._promise_ended)
                return

    def _promise_ended(self, task: Task) -> None:
        self._kept.pop(task.id, None)
        assert task.ending is not None
        outcome = task.ending.outcome
        # What never got into the queue came too late, or found it full: no safety cures that.
        if task.marks.queued and (outcome is Outcome.MET or outcome in _LOST):
            self._forecaster.promise_ended(task.model, kept=outcome is Outcome.MET)

    # ── learning ─────────────────────────────────────────────────────────────────────────────

    def has_room(self) -> None:
        """The queue has room; to be called whenever that may have changed."""
        if self._room_foretold is None or self._queue.full:
            return
        at, foretold_ms = self._room_foretold
        self._room_foretold = None
        self._room_ratios.add(_log_ratio(1000 * (self._clock.now() - at), foretold_ms))

    def queued(self, task: Task) -> None:
        """``task`` has joined the queue; some are remembered, to learn by."""
        self._seen += 1
        now = self._clock.now()
        if self._seen % _EVERY == 0 and now >= self._next_at and not task.is_promised:
            self._next_at = now + _PAUSE_S
            task.foretold = (now, *self._plain_start_ms(task))

    def began(self, task: Task) -> None:
        """``task`` leaves the queue for the first time, to a worker."""
        if task.foretold is None:
            return
        at, foretold_ms, part = task.foretold
        task.foretold = None
        took_ms = 1000 * (self._clock.now() - at)
        if min(took_ms, foretold_ms) >= _LEAST_MS:
            self._ratios[part].add(_log_ratio(took_ms, foretold_ms))

    # ── inside ───────────────────────────────────────────────────────────────────────────────

    def _plain_start_ms(self, task: Task) -> tuple[float, int]:
        """Without what is learnt; and in which part of the queue it stands."""
        now = self._clock.now()
        position = self._queue.place_of(task)
        forecaster = self._forecaster
        running, free = self._running(task.model, now)
        part = min(_PARTS - 1, _PARTS * position // (len(self._queue) + 1))
        if position < free:
            return 0.0, part
        ahead = [
            forecaster.residual_ms(other, now)
            for other in self._queue.first(min(position, MOST_AHEAD))
            if other.model == task.model
        ]
        whole_ms = start_ms(running, ahead, free)
        if position > MOST_AHEAD:
            whole_ms *= (position + 1 - min(0, free)) / (MOST_AHEAD + 1 - min(0, free))
        return whole_ms, part

    def _running(self, model: str, now: float) -> tuple[list[tuple[float, ...]], int]:
        """How long each job on workers may hold its place, and how many places are free."""
        free = 0
        for instance in self._registry:
            if instance.ready and instance.card is not None and instance.card.model == model:
                free += instance.concurrency.limit - instance.load
        running = [
            self._forecaster.residual_ms(attempt.task, now)
            for attempt in self.attempts()
            if attempt.task.model == model and not attempt.is_paused
        ]
        return running, free


def _log_ratio(took_ms: float, foretold_ms: float) -> float:
    ratio = math.log(max(1.0, took_ms) / max(1.0, foretold_ms))
    return min(max(ratio, -_MOST_RATIO), _MOST_RATIO)
