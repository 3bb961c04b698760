"""How long stages take: what is aimed at, what is seen, and when one has taken too long (SL-1)."""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum


class Stage(StrEnum):
    """In the order of a slot; the first two run at the same time."""

    SPEECH = "audio"
    PORTRAIT = "image"
    VIDEO = "video"
    CHECK = "clip"


@dataclass(frozen=True, slots=True)
class StageBudget:
    """Of one stage, in seconds, for a slot of SL-1's size."""

    target_s: float
    timeout_s: float
    retries: int = 0


BUDGETS: Mapping[Stage, StageBudget] = {
    Stage.SPEECH: StageBudget(2.0, 3.0, retries=1),
    Stage.PORTRAIT: StageBudget(12.0, 15.0),
    Stage.VIDEO: StageBudget(8.0, 10.0),
    Stage.CHECK: StageBudget(1.0, 2.0),
}
BACKOFF_S = 0.5
"""Before retry ``n``, the first being 0: this times ``2**n``."""

_KEPT = 64
_ENOUGH = 8
"""Fewer observations than this say nothing about the slowest of them."""
_TIMEOUT_OVER_P95 = 1.5
_MOST_OVER_STATED = 2.0
_OVER_WARM_UP = 2.0
"""How much slower a stage may be than the one that warmed it up."""
_LEAST_OF_STATED = 1 / 1000
_LEAST_OF_WARM_UP = 1 / 16
"""Less work than this share of the warm-up's, a whole picture and a short sentence, takes what a
run costs at all. Taken for a rate, that would have every larger clip refused, and nothing would
ever say better."""


class StageTimes:
    """What was observed of one stage: seconds, and the units of work that they were for."""

    def __init__(self, budget: StageBudget, units: float) -> None:
        """``units``: of the work that ``budget`` is for."""
        self._budget = budget
        self._units = units
        self._seen: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._least_units = _LEAST_OF_STATED * units
        self._expected = budget.target_s / units
        """Seconds for a unit, as long as too few were observed."""
        self.finished = 0
        self.failed = 0
        """By its own fault, or too late: not those that a cancel or a deadline ended."""

    def unseen(self) -> "StageTimes":
        """Of the same budget, with nothing observed."""
        return StageTimes(self._budget, self._units)

    @property
    def budget(self) -> StageBudget:
        return self._budget

    def observe(self, seconds: float, units: float) -> None:
        """A stage was finished. What was cut short says nothing."""
        self.finished += 1
        self._seen.append((seconds, max(units, self._least_units)))

    def end_warm_up(self) -> None:
        """Forget what was observed, but that this is how fast the stage is here: until there is a
        P95, twice what the last one took or, where that is more, what the slowest since took."""
        if self._seen:
            seconds, units = self._seen[-1]
            self._expected = _OVER_WARM_UP * seconds / units
            self._least_units = _LEAST_OF_WARM_UP * units
        self._seen.clear()
        self.finished = self.failed = 0

    @property
    def seconds_per_unit(self) -> float:
        """The observed P95; before there is one, what the warm-up or else the target says."""
        rate = self._rate(0.95)
        if rate is not None:
            return rate
        return max([self._expected, *(seconds / units for seconds, units in self._seen)])

    def predicted_s(self, units: float) -> float:
        """What ``units`` of work take nearly always, in proportion to the work."""
        return self.seconds_per_unit * units

    def timeout_s(self, units: float) -> float:
        """When ``units`` of work have taken too long: 1.5 times the observed P95, but not less
        than the stated target and not more than twice the stated timeout, each in proportion to
        the work where that is more than the budget is for."""
        scale = max(1.0, units / self._units)
        rate = self._rate(0.95)
        if rate is None:
            return self._budget.timeout_s * scale
        least, most = self._budget.target_s, _MOST_OVER_STATED * self._budget.timeout_s
        return min(max(_TIMEOUT_OVER_P95 * rate * units, least * scale), most * scale)

    def percentiles_ms(self) -> dict[str, float]:
        """``p50``, ``p95`` and ``p99`` of the stage's time; empty before there is one."""
        times = sorted(seconds for seconds, _ in self._seen)
        if not times:
            return {}
        return {f"p{q}": 1000 * quantile(times, q / 100) for q in (50, 95, 99)}

    def _rate(self, q: float) -> float | None:
        if len(self._seen) < _ENOUGH:
            return None
        return quantile(sorted(seconds / units for seconds, units in self._seen), q)


def backoffs(retries: int) -> Iterator[float]:
    """Seconds before each retry."""
    return (BACKOFF_S * 2**number for number in range(retries))


def quantile(ordered: Sequence[float], q: float) -> float:
    """Of values in order, by the nearest rank."""
    return ordered[min(len(ordered) - 1, math.ceil(q * len(ordered)) - 1)]
