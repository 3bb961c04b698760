"""Quotes: the chance that a request is in time, by deadline, before it is sent.

A quote says two things of a request that somebody thinks of sending:

- the chance of being in time if it is sent now as any other request, by deadline: the schedule is
  played with it (``schedule``). What such chances really came to is learnt, and corrects them
  (``Reliability``);
- the earliest deadlines that can be reserved, with a chance of 50, 90 and 99 %. A reserved deadline
  is a promise (``promises``): its work goes before all that is not promised. How much time a level
  takes is learnt from the reservations that were kept or broken, so that in the long run the stated
  share is kept, whatever the load does (Gibbs and Candès 2021, eq. 2).
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from typing import Final, NamedTuple

import numpy as np

from orchestrator.clock import Clock
from orchestrator.prediction.forecast import Floats
from orchestrator.prediction.forecaster import ENDS_IN_TIME, KEPT_S, Forecaster
from orchestrator.prediction.promises import RESUBMIT_MS, Promises, Reservation, Stretch
from orchestrator.prediction.schedule import Prospect, Schedule
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.tasks.task import Task
from protocol import Outcome

EDGES: Final = (0.02, *(at / 10 for at in range(1, 10)), 0.98)
"""Chances at which the bins meet; the first and last are narrow, since much is nearly certain."""
BINS: Final = len(EDGES) + 1
PRIOR: Final = 8.0
"""Weight, in outcomes, of the belief that a prediction means what it says."""
HALF_LIFE: Final = 256
_KEPT: Final = 0.5 ** (1 / HALF_LIFE)
_MIDDLES: Final = np.convolve((0.0, *EDGES, 1.0), (0.5, 0.5), "valid")


class ChanceBin(NamedTuple):
    """Outcomes of the predictions of one bin, without any loss of weight."""

    given: int
    chances: float
    """Sum of the chances that were predicted; ``met`` should come out about as large."""
    met: int


class Reliability:
    """Maps predicted chances to calibrated ones, learnt from the outcomes of earlier predictions.

    Outcomes are counted in bins of the predicted chance (Zadrozny and Elkan 2001), and the bins'
    shares are made to rise with it by pooling neighbors that do not (isotonic regression, Zadrozny
    and Elkan 2002). Old outcomes lose their weight.
    """

    def __init__(self) -> None:
        self.bins = [ChanceBin(0, 0.0, 0)] * BINS
        self._weights = np.zeros(BINS)
        self._chances = np.zeros(BINS)
        self._met = np.zeros(BINS)

    def add(self, chance: float, *, met: bool) -> None:
        """Learn from a prediction's outcome; ``chance`` as it was predicted, not calibrated."""
        at = int(np.searchsorted(EDGES, chance, side="right"))
        given, chances, all_met = self.bins[at]
        self.bins[at] = ChanceBin(given + 1, chances + chance, all_met + met)
        for sums, more in ((self._weights, 1.0), (self._chances, chance), (self._met, float(met))):
            sums *= _KEPT
            sums[at] += more

    def calibrated(self, chance: float) -> float:
        """The share of such predictions that is met, by what is known."""
        weights = self._weights + PRIOR
        predicted = (self._chances + PRIOR * _MIDDLES) / weights
        met = (self._met + PRIOR * _MIDDLES) / weights
        return float(np.interp(chance, predicted, _rising(met, weights)))


def _rising(values: Floats, weights: Floats) -> Floats:
    """The rising sequence nearest to ``values`` (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []
    for value, weight in zip(values, weights, strict=True):
        pool = float(value), float(weight), 1
        while pools and pools[-1][0] >= pool[0]:
            before = pools.pop()
            both = before[1] + pool[1]
            mean = (before[0] * before[1] + pool[0] * pool[1]) / both
            pool = mean, both, before[2] + pool[2]
        pools.append(pool)
    return np.repeat([pool[0] for pool in pools], [pool[2] for pool in pools])


BROKEN: Final = {0.5: 0.5, 0.9: 0.1, 0.99: 0.005}
"""Share of reservations that may be broken, by their stated chance. At 99 % half of what is stated,
for a client counts on that."""
FIRST_STRETCH: Final = {0.5: 0.0, 0.9: 0.0, 0.99: 0.4}
"""Logarithms of the factors by which the first reservations take longer than predicted, beyond what
the prediction allows for others that may come: what a client counts on should not pay for what is
not known yet."""
_STRETCH_STEP: Final = 0.08
"""Least step of a stretch. Earlier ones are longer, by the root of their number (Angelopoulos,
Barber and Bates 2024): a service that has just started is as far from what it will learn as it will
ever be."""
_LATER_MS: Final = 3_600_000.0
"""Time until a deadline that puts a request behind all that waits."""


class Pressure(StrEnum):
    """How busy a model's instances are when a chance is predicted. A prediction errs in another way
    in each."""

    IDLE = "idle"
    BUSY = "busy"
    QUEUED = "queued"


class ChanceBy(NamedTuple):
    """The chance of being in time with ``within_ms`` from now until the deadline."""

    within_ms: float
    chance: float


@dataclass(frozen=True, slots=True)
class Quote:
    """What may be expected of one request. Times are ms from now."""

    curve: tuple[ChanceBy, ...]
    """Chances if it is sent now without a reservation; deadlines and chances rise."""
    stated: ChanceBy | None
    """The chance by the deadline that the request itself states; None if it states none."""
    earliest: tuple[ChanceBy, ...]


class Quotes:
    """Makes quotes and reservations, and learns from what becomes of them."""

    def __init__(
        self,
        queue: TaskQueue[Task],
        forecaster: Forecaster,
        schedule: Schedule,
        promises: Promises,
        clock: Clock,
    ) -> None:
        self.made = 0
        self.reserved: Counter[float] = Counter()
        self.ended: Counter[tuple[float, bool]] = Counter()
        """Reservations that were used and ended, by their chance and by whether they were kept."""
        self._queue = queue
        self._forecaster = forecaster
        self._schedule = schedule
        self._promises = promises
        self._clock = clock
        self._reliability = {pressure: Reliability() for pressure in Pressure}
        self._stretch = {
            chance: Stretch(BROKEN[chance], first) for chance, first in FIRST_STRETCH.items()
        }
        """How much longer than predicted the reservations of each chance take."""
        self._next_at = 0.0

    def bins(self) -> list[tuple[Pressure, int, ChanceBin]]:
        """Outcomes of predicted chances, by pressure and number of the bin."""
        return [
            (pressure, at, found)
            for pressure, of in self._reliability.items()
            for at, found in enumerate(of.bins)
        ]

    def quote(self, task: Task) -> Quote:
        """Quote ``task``, which is read and fitted to its model, and will not be sent. Its deadline
        and plan are left as some other ones."""
        self.made += 1
        now = self._clock.now()
        stated = None if task.deadline.is_default else task.deadline.left_ms(now)
        last = self._prospect(task, now, _LATER_MS)
        alone_ms = max(1.0, last.end_ms[0] - last.start_ms[0])
        curve, best = [], 0.0
        for within_ms in np.geomspace(0.6 * alone_ms, 1.5 * max(last.end_ms[-1], alone_ms), BINS):
            best = max(best, self._chance(task, now, float(within_ms)))
            curve.append(ChanceBy(float(within_ms), best))
        of_stated = None
        if stated is not None:
            of_stated = ChanceBy(stated, self._chance(task, now, stated))
        return Quote(tuple(curve), of_stated, self._earliest(task))

    def reserve(self, task: Task, offer: ChanceBy, hold_s: float) -> Reservation:
        """Reserve what a task needs by a deadline of its quote, for a client that comes with it
        within ``hold_s`` seconds. Raises ``RateLimited``."""
        unix_ms = math.ceil(1000 * self._clock.unix() + offer.within_ms)
        learn = partial(self._used, offer.chance)
        reservation = self._promises.reserve(task, unix_ms, offer.chance, hold_s, learn)
        self.reserved[offer.chance] += 1
        return reservation

    # ── predicting ───────────────────────────────────────────────────────────────────────────

    def _chance(self, task: Task, now: float, within_ms: float) -> float:
        raw = _share_within(_times_ms(task, self._prospect(task, now, within_ms)), within_ms)
        return self._reliability[self._pressure(task.model)].calibrated(raw)

    def _prospect(self, task: Task, now: float, within_ms: float) -> Prospect:
        """What ``task`` comes to with that much time: more time means a later place."""
        task.deadline = replace(task.deadline, at=now + within_ms / 1000, is_default=False)
        self._forecaster.plan(task, now)
        return self._schedule.of(task, guesses=True)

    def _earliest(self, task: Task) -> tuple[ChanceBy, ...]:
        """The earliest deadlines that can be reserved: after all that is promised already."""
        times_ms = _times_ms(task, self._schedule.in_a_crowd(task))
        before_ms = self._promises.wait_ms(task.job.tenant, task.work_ms)
        least_ms = self._forecaster.capacity_of(task.model).min_start_ms
        found: dict[float, float] = {}
        # The best known first: what nobody has reserved with yet says nothing of the other levels.
        for chance in sorted(BROKEN, key=self._used_with, reverse=True):
            takes_ms = times_ms[min(len(times_ms) - 1, int(chance * len(times_ms)))]
            stretched_ms = (before_ms + takes_ms) * self._stretch[chance].factor
            within_ms = max(stretched_ms, least_ms) + RESUBMIT_MS
            sooner = [ms for other, ms in found.items() if other < chance]
            later = [ms for other, ms in found.items() if other > chance]
            found[chance] = min(max(within_ms, *sooner, 0.0), *later, math.inf)
        return tuple(ChanceBy(found[chance], chance) for chance in BROKEN)

    def _used_with(self, chance: float) -> int:
        """How many reservations with a chance were used and ended."""
        return self.ended[chance, True] + self.ended[chance, False]

    def _pressure(self, model: str) -> Pressure:
        if self._queue:
            return Pressure.QUEUED
        capacity = self._forecaster.capacity_of(model)
        return Pressure.IDLE if capacity.free >= capacity.slots else Pressure.BUSY

    # ── learning ─────────────────────────────────────────────────────────────────────────────

    def offered(self, task: Task) -> None:
        """Predict whether ``task``, which is let in now, is in time, and learn from its end. Done
        for some of those that state a deadline which can be missed, once quotes are asked for."""
        now = self._clock.now()
        if (
            not self.made
            or now < self._next_at
            or task.deadline.is_default
            or task.is_promised
            or task.job.on_deadline in ENDS_IN_TIME
        ):
            return
        self._next_at = now + KEPT_S  # one prediction takes a millisecond
        times_ms = self._schedule.of(task, guesses=True).end_ms
        chance = _share_within(times_ms, task.deadline.left_ms(now))
        of = self._reliability[self._pressure(task.model)]
        task.on_end.append(lambda ended: _learn(of, chance, ended))

    def _used(self, chance: float, kept: bool) -> None:
        self.ended[chance, kept] += 1
        step = max(_STRETCH_STEP, 1 / math.sqrt(self._used_with(chance)))
        self._stretch[chance].learn(step, kept=kept)


def _times_ms(task: Task, prospect: Prospect) -> tuple[float, ...]:
    """When ``task`` will be served; an answer that ends in time once it has begun only has to
    begin."""
    return prospect.first_ms if task.job.on_deadline in ENDS_IN_TIME else prospect.end_ms


def _share_within(times_ms: Sequence[float], within_ms: float) -> float:
    return sum(ms <= within_ms for ms in times_ms) / len(times_ms)


def _learn(of: Reliability, chance: float, task: Task) -> None:
    ending = task.ending
    if ending is not None and ending.outcome not in (Outcome.ABORTED, Outcome.FAILED):
        of.add(chance, met=ending.outcome is Outcome.MET)
