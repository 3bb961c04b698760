"""Times of the stages: targets, observed times, and timeouts (SL-1)."""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice
from typing import NamedTuple


class ClipStage(StrEnum):
    """The stages of a clip, in order; the first two run at the same time."""

    SPEECH = "audio"
    PORTRAIT = "image"
    VIDEO = "video"
    CHECK = "clip"


@dataclass(frozen=True, slots=True)
class StageBudget:
    """Target and timeout of one stage in seconds, for a clip of SL-1's size."""

    target_s: float
    timeout_s: float
    retries: int = 0


BUDGETS: Mapping[ClipStage, StageBudget] = {
    ClipStage.SPEECH: StageBudget(2.0, 3.0, retries=1),
    ClipStage.PORTRAIT: StageBudget(12.0, 15.0),
    ClipStage.VIDEO: StageBudget(8.0, 10.0),
    ClipStage.CHECK: StageBudget(1.0, 2.0),
}
BACKOFF_S = 0.5
"""Seconds to wait before the first retry; doubled before each further one."""

FRESH_S = 5.0
"""Idle seconds after which a pipeline may be faster than before, when the machine was busy."""

_KEPT = 64
_ENOUGH = 8
"""Minimum number of observations for a derived timeout."""
_FADING = 0.8
"""Factor on an observation's weight each time that the same amount of work has been done since."""
_MUCH_FASTER = 1 / 4
"""Share of the expected time below which a run counts as much faster. After two such runs in a row,
or one after an idle time, earlier observations, from a busier machine, are dropped."""
_AT_BEST = 0.8
"""Share of the fastest recent rate that serves as a lower bound for all runs."""
_TIMEOUT_OVER_P95 = 1.5
_MAX_OVER_STATED = 2.0
_OVER_WARM_UP = 2.0
"""Factor by which a stage may be slower than its warm-up."""
_MIN_OF_STATED = 1 / 1000
_MIN_OF_WARM_UP = 1 / 16
"""Minimum work for a rate, as a share of the warm-up's work (a whole picture, a short sentence).
Smaller runs are dominated by their fixed cost. As a rate, that would make every larger clip
refused, and nothing would ever correct the rate."""


class _Seen(NamedTuple):
    seconds: float
    units: float
    is_whole: bool

    @property
    def rate(self) -> float:
        return self.seconds / self.units


class Activity:
    """Tracks the busy periods (spells) of one pipeline's stages, separated by idle times."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._running = 0
        self._ran_at = -math.inf
        self._spells = 0

    @property
    def spell(self) -> int | None:
        """Number of the current spell; None while the pipeline is idle."""
        is_idle = not self._running and self._now() - self._ran_at >= FRESH_S
        return None if is_idle else self._spells

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count a stage as working inside this context."""
        self.touch()
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1
            self.touch()

    def touch(self) -> None:
        """Note that a stage is working now."""
        self._spells += self.spell is None
        self._ran_at = self._now()


class StageTimes:
    """Observed times of one stage: seconds, and their units of work.

    There are three estimates: ``likely_s`` (rarely longer) for promises and order, ``least_s``
    (never shorter) for refusals, and ``hoped_s`` for choices that can still be changed.
    """

    def __init__(self, budget: StageBudget, units: float, activity: Activity | None = None) -> None:
        """``units``: the work for which ``budget`` is. ``activity``: that of the pipeline."""
        self.budget = budget
        self._units = units
        self.activity = activity or Activity()
        self._seen: deque[_Seen] = deque(maxlen=_KEPT)
        self._least_units = _MIN_OF_STATED * units
        self._expected = budget.target_s / units
        """Seconds per unit of work, as long as nothing was observed."""
        self._spell: int | None = None
        """Number of the spell with the latest observation."""
        self._slow_rate = 0.0
        """Seconds per unit that work rarely exceeds: the P95 of observed rates."""

    def observe(self, seconds: float, units: float, *, is_whole: bool = True) -> None:
        """Record a run of the stage, or the ``units`` of a stopped run; too few of those are
        ignored."""
        if not is_whole and units < self._least_units:
            return
        self.activity.touch()
        is_first, self._spell = self.activity.spell != self._spell, self.activity.spell
        new = _Seen(seconds, max(units, self._least_units), is_whole)
        much_faster = _MUCH_FASTER * self._slow_rate
        if self._seen and new.rate < much_faster:
            last = self._seen[-1]
            if is_first:
                self._seen.clear()
            elif last.rate < much_faster:
                self._seen = deque([last], maxlen=_KEPT)
        self._seen.append(new)
        self._slow_rate = self._p95_rate()

    def end_warm_up(self) -> None:
        """Reduce the observations to an estimate: twice the fastest rate, until a client's clip is
        rendered."""
        if self._seen:
            self._expected = _OVER_WARM_UP * self._fastest_rate()
            self._least_units = _MIN_OF_WARM_UP * self._seen[-1].units
        self._seen.clear()

    @property
    def is_known(self) -> bool:
        """Whether observations show the current speed of the stage. Its warm-up does not, because
        the machine is busiest while models load."""
        return bool(self._seen) and self.activity.spell == self._spell

    @property
    def seconds_per_unit(self) -> float:
        """The observed P95; before that, an estimate from the warm-up, else the target."""
        return self._slow_rate if self._seen else self._expected

    @property
    def least_per_unit(self) -> float:
        """Minimum seconds per unit, from recent observations; 0 without any."""
        return _AT_BEST * self._fastest_rate() if self.is_known else 0.0

    def likely_s(self, units: float) -> float:
        """Seconds that ``units`` of work rarely exceed, in proportion to the work."""
        return self.seconds_per_unit * units

    def least_s(self, units: float) -> float:
        """Minimum seconds for ``units`` of work; 0 if unknown."""
        return self.least_per_unit * units

    def hoped_s(self, units: float) -> float:
        """Seconds that ``units`` of work rarely exceed; 0 if unknown."""
        return self.likely_s(units) if self.is_known else 0.0

    def timeout_s(self, units: float) -> float:
        """Timeout in seconds for ``units`` of work: 1.5 times the observed P95, but at least the
        stated target and at most twice the stated timeout. Both are scaled up if the work is more
        than the budget's."""
        scale = max(1.0, units / self._units)
        if len(self._seen) < _ENOUGH:
            return self.budget.timeout_s * scale
        least, most = self.budget.target_s, _MAX_OVER_STATED * self.budget.timeout_s
        return min(max(_TIMEOUT_OVER_P95 * self._slow_rate * units, least * scale), most * scale)

    @property
    def p95_ms(self) -> float | None:
        """P95 of finished runs, in ms; None before there is one."""
        times = sorted(one.seconds for one in self._seen if one.is_whole)
        return 1000 * quantile(times, 0.95) if times else None

    def _fastest_rate(self) -> float:
        return min(one.rate for one in self._seen)

    def _p95_rate(self) -> float:
        """The P95 of seconds per unit. Each observation is weighted by its work, so that the fixed
        cost of short clips does not look like the pace of long ones. Weights decrease with age."""
        weighted: list[tuple[float, float]] = []
        for at, one in enumerate(self._seen):
            age = sum(
                min(1.0, newer.units / one.units) for newer in islice(self._seen, at + 1, None)
            )
            weighted.append((one.rate, one.units * _FADING**age))
        slower = 0.05 * sum(weight for _, weight in weighted)
        for rate, weight in sorted(weighted, reverse=True):
            slower -= weight
            if slower < 0:
                return rate
        raise AssertionError("nothing was observed")


def backoffs(retries: int) -> Iterator[float]:
    """Seconds before each retry."""
    return (BACKOFF_S * 2**number for number in range(retries))


def quantile(ordered: Sequence[float], q: float) -> float:
    """The ``q`` quantile (0 to 1) of values in ascending order, by the nearest rank."""
    return ordered[min(len(ordered) - 1, math.ceil(q * len(ordered)) - 1)]
