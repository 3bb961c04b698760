"""Quotes: the chance that a request is in time, by deadline, before it is sent.

A quote says two things about a request that a client may send:

- its chance of being in time if it is sent now without a reservation, by deadline. The schedule is
  simulated with it (``schedule``). The outcomes of earlier predictions calibrate the chances
  (``Reliability``);
- the earliest deadlines that can be reserved, with a chance of 50, 90 and 99 %. A reserved deadline
  is a promise (``promises``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np

from orchestrator.clock import Clock
from orchestrator.prediction.answer_length import HALF_LIFE, PRIOR
from orchestrator.prediction.forecast import Floats
from orchestrator.prediction.forecaster import ENDS_IN_TIME, Forecaster
from orchestrator.prediction.promises import Promises, served_ms
from orchestrator.prediction.schedule import Prospect, Schedule
from orchestrator.prediction.urgency import LOST, SURE
from orchestrator.tasks.task import Task
from protocol import HEARTBEAT_S, Outcome

EDGES: Final = (0.02, *(at / 10 for at in range(1, 10)), 0.98)
"""Edges of the bins of chances; the outer bins are narrow, as many chances are nearly certain."""
BINS: Final = len(EDGES) + 1
_KEPT: Final = 0.5 ** (1 / HALF_LIFE)
_MIDDLES: Final = np.convolve((0.0, *EDGES, 1.0), (0.5, 0.5), "valid")


class ChanceBin(NamedTuple):
    """Outcomes of the predictions of one bin, all with full weight."""

    given: int
    chances: float
    """Sum of the predicted chances; ``met`` should be about as large."""
    met: int


class Reliability:
    """Maps predicted chances to calibrated ones, learned from the outcomes of earlier predictions.

    Outcomes are counted in bins of the predicted chance (Zadrozny and Elkan 2001). Neighboring bins
    whose shares do not rise are pooled (isotonic regression, Zadrozny and Elkan 2002). Old outcomes
    lose their weight.
    """

    def __init__(self) -> None:
        self.bins = [ChanceBin(0, 0.0, 0)] * BINS
        self._weights = np.zeros(BINS)
        self._chances = np.zeros(BINS)
        self._met = np.zeros(BINS)

    def add(self, chance: float, *, met: bool) -> None:
        """Learn from a prediction's outcome; ``chance`` is the one before calibration."""
        at = int(np.searchsorted(EDGES, chance, side="right"))
        given, chances, all_met = self.bins[at]
        self.bins[at] = ChanceBin(given + 1, chances + chance, all_met + met)
        for sums, more in ((self._weights, 1.0), (self._chances, chance), (self._met, float(met))):
            sums *= _KEPT
            sums[at] += more

    def calibrated(self, chance: float) -> float:
        """The estimated share of such predictions that are met."""
        weights = self._weights + PRIOR  # the prior: predictions are calibrated
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


_LATER_MS: Final = 3_600_000.0
"""Time until a deadline that puts a request behind all waiting requests."""


class ChanceBy(NamedTuple):
    """The chance of being in time with ``within_ms`` from now until the deadline."""

    within_ms: float
    chance: float


@dataclass(frozen=True, slots=True)
class Quote:
    """The forecast of one request for its client. Times are ms from now."""

    curve: tuple[ChanceBy, ...]
    """Chances if it is sent now without a reservation, in rising order of deadlines and chances."""
    stated: ChanceBy | None
    """The chance at the deadline that the request states; None if it states none."""
    earliest: tuple[ChanceBy, ...]


class Quotes:
    """Makes quotes, and learns from the outcomes of predictions."""

    def __init__(
        self,
        forecaster: Forecaster,
        schedule: Schedule,
        promises: Promises,
        clock: Clock,
    ) -> None:
        self.made = 0
        self.reliability = Reliability()
        self._forecaster = forecaster
        self._schedule = schedule
        self._promises = promises
        self._clock = clock
        self._next_at = 0.0

    def quote(self, task: Task) -> Quote:
        """Quote ``task``, which is read and fitted to its model. It must not be sent: this
        overwrites its deadline and plan."""
        self.made += 1
        now = self._clock.now()
        stated = None if task.deadline.is_default else task.deadline.left_ms(now)
        last = self._prospect(task, now, _LATER_MS)
        alone_ms = max(1.0, last.end_ms[0] - last.start_ms[0])
        curve, best = [], 0.0
        for within_ms in np.geomspace(LOST * alone_ms, SURE * max(last.end_ms[-1], alone_ms), BINS):
            best = max(best, self._chance(task, now, float(within_ms)))
            curve.append(ChanceBy(float(within_ms), best))
        of_stated = None
        if stated is not None:
            of_stated = ChanceBy(stated, self._chance(task, now, stated))
        put_off_ms = self._promises.put_off_ms(task, last)
        earliest = self._promises.earliest_ms(task, last, put_off_ms)
        offers = tuple(ChanceBy(ms, chance) for chance, ms in sorted(earliest.items()))
        return Quote(tuple(curve), of_stated, offers)

    # ── predicting ───────────────────────────────────────────────────────────────────────────

    def _chance(self, task: Task, now: float, within_ms: float) -> float:
        raw = _share_within(served_ms(task, self._prospect(task, now, within_ms)), within_ms)
        return self.reliability.calibrated(raw)

    def _prospect(self, task: Task, now: float, within_ms: float) -> Prospect:
        """The prospect of ``task`` with this time to its deadline: more time, a later place."""
        task.deadline = replace(task.deadline, at=now + within_ms / 1000, is_default=False)
        self._forecaster.plan(task, now)
        return self._schedule.of(task, guesses=True)

    # ── learning ─────────────────────────────────────────────────────────────────────────────

    def offered(self, task: Task) -> None:
        """Predict whether ``task``, which is admitted now, is in time, and learn from its end. Done
        for some of the tasks whose stated deadline can be missed, after the first quote."""
        now = self._clock.now()
        if (
            not self.made
            or now < self._next_at
            or task.deadline.is_default
            or task.is_promised
            or task.job.on_deadline in ENDS_IN_TIME
        ):
            return
        self._next_at = now + HEARTBEAT_S  # one prediction takes a millisecond
        times_ms = self._schedule.of(task, guesses=True).end_ms
        chance = _share_within(times_ms, task.deadline.left_ms(now))
        task.on_end.append(lambda ended: self._learn(chance, ended))

    def _learn(self, chance: float, task: Task) -> None:
        ending = task.ending
        if ending is not None and ending.outcome not in (Outcome.ABORTED, Outcome.FAILED):
            self.reliability.add(chance, met=ending.outcome is Outcome.MET)


def _share_within(times_ms: Sequence[float], within_ms: float) -> float:
    return sum(ms <= within_ms for ms in times_ms) / len(times_ms)
