"""Circuit breakers: an instance that fails, or takes much longer than predicted, gets no work for a
while (DL-11).

::

    CLOSED ──half of the last jobs failed──▶ OPEN ──open_s is over──▶ HALF_OPEN
       ▲                                      ▲                         │   │
       │                                      └────── a probe fails ────┘   │
       └──────────────── enough probes succeed ─────────────────────────────┘

Only an instance's own fault is a failure: an error, or a time far above its prediction and much
further above than its peers' times. A deadline that was too tight, a cancel or a disconnected
client is not a failure. At most a share of an instance's peers is ejected at once, and never the
last one: if none would remain, all are used again. The exception is an instance that has failed
``BLACKOUT`` jobs in a row: it gets only probes, even if no other remains.
"""

import math
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Final, Protocol

from orchestrator.instances.instance import Instance
from orchestrator.prediction.step_model import Load, StepModel, Work
from orchestrator.telemetry.log import fields, service_log
from protocol import AbortCause, Code, End, FinishReason

WINDOW: Final = 20
"""Number of the latest jobs that count."""
MIN_RESULTS: Final = 5
FAILURE_SHARE: Final = 0.5
"""Share of failed jobs that opens the breaker."""
SLOW_RATIO: Final = 3.0
"""Ratio of actual to predicted time that is a failure, in units of the peers' usual ratio …"""
SLOW_FLOOR_MS: Final = 250.0
"""… if the job also takes this many ms longer: short jobs easily take three times as long."""
OPEN_S: Final = 5.0
"""Seconds that a breaker stays open at first; doubled each time that its probes fail."""
MAX_OPEN_S: Final = 60.0
PROBES: Final = 2
"""Maximum number of concurrent jobs while half open."""
PROBES_TO_CLOSE: Final = 3
BLACKOUT: Final = 8
"""Number of consecutive failed jobs after which even the last instance is ejected."""
MAX_EJECTED: Final = 0.5
"""Maximum share of an instance's peers, itself included, whose breakers are open at once."""
_SAME_LOSS_S: Final = 1.0
"""Seconds within which lost jobs count as one failure: they were lost with one lane."""


class BreakerState(StrEnum):
    """Whether an instance gets work: all, none, or a few probes."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class JobResult(StrEnum):
    """The result of a job for its instance's breaker."""

    FINISHED = "finished"
    DEADLINE = "deadline"
    """The deadline passed: a failure only if the job also took longer than predicted."""
    ABORTED = "aborted"
    """Stopped by an external request."""
    REFUSED = "refused"
    """The instance has no room or is shutting down."""
    LOST = "lost"
    """The job was lost with its lane, which counts once for all of the lane's jobs."""
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class BreakerToken:
    """A running job; ``probe`` is the number of the half-open period that it probes, 0 if none."""

    instance: str
    probe: int = 0


@dataclass(frozen=True, slots=True)
class _Sample:
    failed: bool
    ratio: float | None
    """Ratio of actual to predicted time; None unless both are known."""
    is_error: bool = False
    """Whether the job failed with an error, not because it was slow."""


class Breaker:
    """One instance's breaker. ``Breakers`` decides what is a failure and whether it may open."""

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=WINDOW)
        self._state = BreakerState.CLOSED
        self._open_s = OPEN_S
        self._open_until = 0.0
        self._period = 0
        self._probing = 0
        self._good_probes = 0
        self._errors = 0
        """Number of consecutive jobs that failed with an error, up to the latest."""

    @property
    def is_dark(self) -> bool:
        return self._errors >= BLACKOUT

    def open_s(self, now: float) -> float:
        """Remaining seconds in which the instance gets no work, not even probes; 0 unless open."""
        return self._open_until - now if self.state(now) is BreakerState.OPEN else 0.0

    def state(self, now: float) -> BreakerState:
        if self._state is BreakerState.OPEN and now >= self._open_until:
            self._state = BreakerState.HALF_OPEN
            self._period += 1
            self._probing = self._good_probes = 0
        return self._state

    def admits(self, now: float) -> bool:
        state = self.state(now)
        if state is BreakerState.HALF_OPEN:
            return self._probing < PROBES
        return state is BreakerState.CLOSED

    def begin(self, now: float) -> int:
        """Count a sent job. Returns the half-open period that it probes, 0 if none."""
        if self.state(now) is not BreakerState.HALF_OPEN:
            return 0
        self._probing += 1
        return self._period

    def end(self, probe: int, sample: _Sample | None, now: float, *, may_open: bool) -> bool:
        """Count a job's end, with a sample if it is informative. True if the breaker opened."""
        state = self.state(now)
        was_dark = self.is_dark
        if sample is not None:
            self._errors = self._errors + 1 if sample.is_error else 0
        if state is BreakerState.HALF_OPEN:
            return self._end_probe(probe, sample, now)
        if state is BreakerState.OPEN and self.is_dark and not was_dark:
            # The instance was used anyway, because there was no other.
            self._open_until = now + self._open_s
        if state is BreakerState.OPEN or sample is None:
            return False  # jobs sent before the breaker opened add nothing
        self._samples.append(sample)
        count, failures = len(self._samples), sum(s.failed for s in self._samples)
        is_bad = count >= MIN_RESULTS and failures >= FAILURE_SHARE * count
        if sample.failed and ((is_bad and may_open) or self.is_dark):
            self._open(now, OPEN_S)
            return True
        return False

    @property
    def usual_ratio(self) -> float | None:
        """Median ratio of actual to predicted time of the instance's jobs; None if unknown."""
        ratios = [s.ratio for s in self._samples if s.ratio is not None]
        return median(ratios) if len(ratios) >= MIN_RESULTS else None

    def _end_probe(self, probe: int, sample: _Sample | None, now: float) -> bool:
        if probe != self._period:
            return False
        self._probing -= 1
        if sample is None:
            return False
        if sample.failed:
            self._open(now, min(2 * self._open_s, MAX_OPEN_S))
            return True
        self._good_probes += 1
        if self._good_probes >= PROBES_TO_CLOSE:
            self._state = BreakerState.CLOSED
        return False

    def _open(self, now: float, open_s: float) -> None:
        self._state = BreakerState.OPEN
        self._open_s = open_s
        self._open_until = now + open_s
        self._samples.clear()


class Breakers:
    """All breakers. ``peers`` returns the instances that can do an instance's work, with itself."""

    def __init__(
        self,
        peers: Callable[[str], Collection[str]],
        now: Callable[[], float],
    ) -> None:
        self._peers = peers
        self._now = now
        self._breakers: defaultdict[str, Breaker] = defaultdict(Breaker)
        self._lost_at: dict[str, float] = {}
        self.ejections: Counter[str] = Counter()
        """Number of times that each instance's breaker opened."""

    def state(self, instance: str) -> BreakerState:
        return self._breakers[instance].state(self._now())

    def admits(self, instance: str) -> bool:
        """Whether an instance may get work: its breaker admits it, or no peer's breaker does and
        the instance does not fail everything."""
        breaker, now = self._breakers[instance], self._now()
        if breaker.admits(now):
            return True
        peers = (self._breakers[peer] for peer in self._peers(instance))
        return not (breaker.is_dark or any(peer.admits(now) for peer in peers))

    def dark_s(self, instance: str) -> float:
        """Remaining seconds without work for an instance that fails everything; 0 for others."""
        breaker = self._breakers[instance]
        return breaker.open_s(self._now()) if breaker.is_dark else 0.0

    def begin(self, instance: str) -> BreakerToken:
        """Count a job that is sent to an instance. Return the token with ``end``."""
        return BreakerToken(instance, self._breakers[instance].begin(self._now()))

    def end(
        self, token: BreakerToken, result: JobResult, *, predicted_ms: float, actual_ms: float
    ) -> bool:
        """Count a job's end; ``predicted_ms`` is 0 if unknown. True if the breaker opened."""
        name = token.instance
        sample, may_open = self._sample(name, result, predicted_ms, actual_ms), self._may_open(name)
        opened = self._breakers[name].end(token.probe, sample, self._now(), may_open=may_open)
        self.ejections[name] += opened
        return opened

    def remove(self, instance: str) -> None:
        self._breakers.pop(instance, None)
        self._lost_at.pop(instance, None)
        del self.ejections[instance]

    def _sample(
        self, name: str, result: JobResult, predicted_ms: float, actual_ms: float
    ) -> _Sample | None:
        """The sample for a result; None if the result is not informative."""
        if result in (JobResult.ABORTED, JobResult.REFUSED):
            return None
        if result is JobResult.LOST:
            before = self._lost_at.get(name, -math.inf)
            self._lost_at[name] = self._now()
            return _Sample(True, None) if self._now() - before >= _SAME_LOSS_S else None
        if result is JobResult.FAILED:
            return _Sample(True, None, is_error=True)
        ratio = actual_ms / predicted_ms if predicted_ms > 0 else None
        slow = (
            ratio is not None
            and actual_ms - predicted_ms > SLOW_FLOOR_MS
            and ratio > SLOW_RATIO * self._usual_elsewhere(name)
        )
        if result is JobResult.DEADLINE and not slow:
            return None
        return _Sample(slow, ratio)

    def _usual_elsewhere(self, name: str) -> float:
        """Median ratio of peers' actual to predicted times, at least 1: the step model's error."""
        known = [
            ratio
            for peer in self._peers(name)
            if peer != name and (ratio := self._breakers[peer].usual_ratio) is not None
        ]
        return max(1.0, median(known)) if known else 1.0

    def _may_open(self, name: str) -> bool:
        peers = set(self._peers(name)) | {name}
        ejected = sum(self.state(peer) is not BreakerState.CLOSED for peer in peers - {name})
        return ejected + 1 <= math.floor(MAX_EJECTED * len(peers))


_RESULTS = {
    Code.CANCELLED: JobResult.ABORTED,
    Code.CLIENT_DISCONNECTED: JobResult.ABORTED,
    Code.DEADLINE_EXCEEDED: JobResult.DEADLINE,
    Code.ENGINE_ERROR: JobResult.FAILED,
    Code.NOT_FINITE: JobResult.FAILED,
    Code.INTERNAL: JobResult.FAILED,
    Code.INSTANCE_LOST: JobResult.LOST,
}
"""Results by code; any other code is a refusal: of the request, or for lack of room or time."""


class AttemptFacts(Protocol):
    """The dispatcher's facts about a job. ``dispatched_at`` is in seconds of the clock."""

    @property
    def breaker_token(self) -> BreakerToken: ...
    @property
    def cause(self) -> AbortCause | None: ...
    @property
    def basis(self) -> tuple[StepModel, Load] | None: ...
    @property
    def dispatched_at(self) -> float: ...


def record_end(
    breakers: Breakers,
    instance: Instance | None,
    attempt: AttemptFacts,
    end: End | None,
    now: float,
) -> None:
    """Record the end of one job in its instance's breaker; without ``end`` the job was lost."""
    if instance is None:  # removed meanwhile
        return
    result = JobResult.LOST if end is None else classify_end(end, attempt.cause)
    predicted_ms = 0.0 if end is None else _predicted_ms(instance, attempt, end)
    actual_ms = 1000 * (now - attempt.dispatched_at)
    if breakers.end(attempt.breaker_token, result, predicted_ms=predicted_ms, actual_ms=actual_ms):
        service_log.warning(
            "circuit breaker opened: the instance fails or takes much longer than predicted",
            extra=fields(instance=instance.address, last=result.value),
        )


def classify_end(end: End, cause: AbortCause | None) -> JobResult:
    """The result of a job's end for its worker. ``cause``: why we stopped it, if we did."""
    if cause is not None or end.reason is FinishReason.CANCELLED:
        return JobResult.ABORTED
    if end.code is not None:
        return _RESULTS.get(end.code, JobResult.REFUSED)
    return JobResult.DEADLINE if end.reason is FinishReason.DEADLINE else JobResult.FINISHED


def _predicted_ms(instance: Instance, attempt: AttemptFacts, end: End) -> float:
    """Ms that jobs with the same work rarely exceed; 0 while unknown. Jobs that arrived while it
    ran also slowed it down, which is not the instance's fault."""
    if attempt.basis is None or not attempt.basis[0].known:
        return 0.0
    model, load = attempt.basis
    work = Work(end.prompt_tokens, end.cached_tokens, max(1, end.completion_tokens))
    return max(model.upper_ms(work, at) for at in (load, instance.occupancy))
