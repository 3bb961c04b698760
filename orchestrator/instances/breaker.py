"""Breakers: an instance that fails, or takes far longer than it was predicted to, rests (DL-11).

::

    CLOSED ──half of the last results charged──▶ OPEN ──its time is over──▶ HALF_OPEN
       ▲                                          ▲                           │   │
       │                                          └──── a probe is charged ───┘   │
       └───────────────── enough probes went well ────────────────────────────────┘

Only what an instance does itself is charged: an error, or more time than its own prediction, by
far, and by far more than its peers exceed theirs. A deadline that was too tight, a cancel or a
client that left is not. At most a share of an instance's peers is ejected at once, never the last
one: where none would be left, all are used again.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from statistics import median

_SAME_LOSS_S = 1.0


class BreakerState(StrEnum):
    """Whether an instance is given work: all, none, or a few probes."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class JobEnd(StrEnum):
    """How a job on an instance ended, as far as the instance is to be judged by it."""

    FINISHED = "finished"
    DEADLINE = "deadline"
    """Its deadline came first; this tells nothing unless it took longer than predicted as well."""
    ABORTED = "aborted"
    """Somebody outside wanted it to stop."""
    REFUSED = "refused"
    """The instance said that it has no room, or is going away."""
    LOST = "lost"
    """It went down with its lane, which counts once however many jobs were on it."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class BreakerConfig:
    """When an instance rests, and for how long."""

    window: int = 20
    """Results that count."""
    least_results: int = 5
    trip_share: float = 0.5
    """This share of them charged opens the breaker."""
    slow_ratio: float = 3.0
    """Actual over predicted time that is charged, in units of what its peers' ratio is …"""
    slow_floor_ms: float = 250.0
    """… if it is this much more as well: short jobs are easily three times as long."""
    rest_s: float = 5.0
    """The first rest; each that follows without a recovery is twice as long, up to the most."""
    rest_most_s: float = 60.0
    probes: int = 2
    """Jobs at once while half open."""
    probes_to_close: int = 3
    most_ejected: float = 0.5
    """Share of an instance's peers, itself included, that may rest at the same time."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """A job under way; ``probe`` names the half-open period that it probes, 0 for none."""

    instance: str
    probe: int = 0


@dataclass(frozen=True, slots=True)
class _Result:
    charged: bool
    ratio: float | None
    """Actual over predicted time, where both are known."""


class Breaker:
    """One instance's. The fleet decides what is charged, and whether it may open."""

    def __init__(self, config: BreakerConfig) -> None:
        self._config = config
        self._results: deque[_Result] = deque(maxlen=config.window)
        self._state = BreakerState.CLOSED
        self._rest_s = config.rest_s
        self._rests_until = 0.0
        self._period = 0
        self._probing = 0
        self._good_probes = 0

    def state(self, now: float) -> BreakerState:
        """As of ``now``: a rest ends by itself."""
        if self._state is BreakerState.OPEN and now >= self._rests_until:
            self._state = BreakerState.HALF_OPEN
            self._period += 1
            self._probing = self._good_probes = 0
        return self._state

    def admits(self, now: float) -> bool:
        """Whether one more job may be sent."""
        state = self.state(now)
        if state is BreakerState.HALF_OPEN:
            return self._probing < self._config.probes
        return state is BreakerState.CLOSED

    def begin(self, now: float) -> int:
        """A job is sent; returns the half-open period that it probes, 0 for none."""
        if self.state(now) is not BreakerState.HALF_OPEN:
            return 0
        self._probing += 1
        return self._period

    def end(self, probe: int, result: _Result | None, now: float, *, may_open: bool) -> bool:
        """A job is over, with a result if it tells anything. True if the breaker opened."""
        state = self.state(now)
        if state is BreakerState.HALF_OPEN:
            return self._end_probe(probe, result, now)
        if state is BreakerState.OPEN or result is None:
            return False  # what was sent before the rest tells nothing new
        self._results.append(result)
        charged = sum(r.charged for r in self._results)
        if (
            result.charged
            and len(self._results) >= self._config.least_results
            and charged >= self._config.trip_share * len(self._results)
            and may_open
        ):
            self._open(now, self._config.rest_s)
            return True
        return False

    @property
    def usual_ratio(self) -> float | None:
        """What its jobs took over what was predicted, in the middle; None while unknown."""
        ratios = [r.ratio for r in self._results if r.ratio is not None]
        return median(ratios) if len(ratios) >= self._config.least_results else None

    def _end_probe(self, probe: int, result: _Result | None, now: float) -> bool:
        if probe != self._period:
            return False
        self._probing -= 1
        if result is None:
            return False
        if result.charged:
            self._open(now, min(2 * self._rest_s, self._config.rest_most_s))
            return True
        self._good_probes += 1
        if self._good_probes >= self._config.probes_to_close:
            self._state = BreakerState.CLOSED
        return False

    def _open(self, now: float, rest_s: float) -> None:
        self._state = BreakerState.OPEN
        self._rest_s = rest_s
        self._rests_until = now + rest_s
        self._results.clear()


class Breakers:
    """All instances' breakers. ``peers`` gives those that could do an instance's work, with it."""

    def __init__(
        self,
        peers: Callable[[str], Collection[str]],
        now: Callable[[], float],
        config: BreakerConfig | None = None,
    ) -> None:
        self._config = config or BreakerConfig()
        self._peers = peers
        self._now = now
        self._breakers: dict[str, Breaker] = {}
        self._lost_at: dict[str, float] = {}
        self.ejections: Counter[str] = Counter()
        """How often each instance's breaker opened."""

    def state(self, instance: str) -> BreakerState:
        breaker = self._breakers.get(instance)
        return BreakerState.CLOSED if breaker is None else breaker.state(self._now())

    def admits(self, instance: str) -> bool:
        """Whether an instance may be given work: by its breaker, or since no peer's admits any."""
        if self._admits(instance):
            return True
        return not any(self._admits(peer) for peer in self._peers(instance))

    def begin(self, instance: str) -> Ticket:
        """A job goes to an instance. Give the ticket back with ``end``."""
        breaker = self._breakers.get(instance)
        return Ticket(instance, 0 if breaker is None else breaker.begin(self._now()))

    def end(self, ticket: Ticket, end: JobEnd, *, predicted_ms: float, actual_ms: float) -> bool:
        """A job is over; ``predicted_ms`` is 0 where nothing was. True if the breaker opened."""
        name = ticket.instance
        breaker = self._breakers.setdefault(name, Breaker(self._config))
        result = self._judge(name, end, predicted_ms, actual_ms)
        opened = breaker.end(ticket.probe, result, self._now(), may_open=self._may_open(name))
        self.ejections[name] += opened
        return opened

    def forget(self, instance: str) -> None:
        """An instance is gone for good."""
        self._breakers.pop(instance, None)
        self._lost_at.pop(instance, None)
        del self.ejections[instance]

    def _judge(
        self, name: str, end: JobEnd, predicted_ms: float, actual_ms: float
    ) -> _Result | None:
        if end in (JobEnd.ABORTED, JobEnd.REFUSED):
            return None
        if end is JobEnd.LOST:
            before = self._lost_at.get(name, -math.inf)
            self._lost_at[name] = self._now()
            return _Result(True, None) if self._now() - before >= _SAME_LOSS_S else None
        if end is JobEnd.FAILED:
            return _Result(True, None)
        ratio = actual_ms / predicted_ms if predicted_ms > 0 else None
        slow = (
            ratio is not None
            and actual_ms - predicted_ms > self._config.slow_floor_ms
            and ratio > self._config.slow_ratio * self._usual_elsewhere(name)
        )
        if end is JobEnd.DEADLINE and not slow:
            return None
        return _Result(slow, ratio)

    def _usual_elsewhere(self, name: str) -> float:
        """By how much peers exceed their predictions; 1 if they do not: errors of the model."""
        known = [
            ratio
            for peer in self._peers(name)
            if peer != name
            and (breaker := self._breakers.get(peer)) is not None
            and (ratio := breaker.usual_ratio) is not None
        ]
        return max(1.0, median(known)) if known else 1.0

    def _may_open(self, name: str) -> bool:
        peers = set(self._peers(name)) | {name}
        resting = sum(self.state(peer) is not BreakerState.CLOSED for peer in peers - {name})
        return resting + 1 <= math.floor(self._config.most_ejected * len(peers))

    def _admits(self, instance: str) -> bool:
        breaker = self._breakers.get(instance)
        return breaker is None or breaker.admits(self._now())
