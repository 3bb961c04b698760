"""Decides whether a deadline will be missed, and handles such work (DL-7, DL-17).

Work that is certain to miss, or that adds less than the least chance to what is met (``schedule``),
is refused on arrival, or while it waits. Of every kind of decision
that ends a request unserved a sample is not carried out: that task is let through, and nothing but
its deadline stops it. The share of the sample that is met is the rate of false refusals.
"""

import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Final, Generic, NamedTuple, Protocol, Self, TypeVar

from orchestrator.clock import Clock
from orchestrator.errors import DeadlineInfeasible
from orchestrator.prediction.forecast import at_share
from orchestrator.prediction.forecaster import LONG, USUAL, Forecaster
from orchestrator.prediction.promises import Promises
from orchestrator.prediction.schedule import Prospect, Schedule
from orchestrator.queue.task_queue import AT_ONCE
from orchestrator.tasks.deadline import Part
from orchestrator.tasks.task import Task
from orchestrator.telemetry.log import fields, service_log
from protocol import Code, Outcome

_SMOOTHING = 0.01
"""Weight of one request in the recent share of refusals: that of the last hundred or so."""
LOOK_BURST_S = 0.5
"""Seconds of CPU time that closer looks may take at once: a crowd of 64 is looked at one by one;
what comes beyond that is looked at together, as it waits."""
LOOK_SHARE = 0.05
"""Share of the loop's CPU time that they may take in the long run. Each look plays the schedule a
few times. At twice the capacity of the demo model, with engine and clients on the same two cores,
0.03, 0.06, 0.1 and 0.25 met 43, 48, 43 and 35 %, and 46, 38, 31 and 17 % of the others heard by
half of their deadline (with a least chance of 0.3; means of eight runs of 240 or 480 requests, six
of the last)."""


class AdmissionMode(StrEnum):
    """How the service treats work that is certain to miss its deadline."""

    ENFORCE = "enforce"
    OBSERVE = "observe"
    """Work that is certain to miss is let in and counted."""
    OFF = "off"


REFUSAL_SAMPLE: Final = 0.01
"""Share of infeasibility refusals, and of all other decisions that end a request unserved, that are
not carried out, to measure how many are wrong (DL-17)."""


@dataclass(frozen=True, slots=True)
class FeasibilityConfig:
    """Settings of refusals."""

    mode: AdmissionMode
    least_chance: float
    """Chance (0 to 1) below which work is refused; 0 refuses only what is certain to miss."""
    refusal_cap: float
    """Largest share of recent requests (the last 100 or so) that is refused as infeasible."""
    sample: float
    """Share of would-be refusals that is let through, to measure how many would have been wrong."""

    def is_capped(self, recent_share: float) -> bool:
        """Whether refusals have reached the cap, so that all work is let in."""
        return self.refusal_cap < 1 and recent_share >= self.refusal_cap


class RefusalKind(StrEnum):
    """Kinds of decisions of ours that end a request unserved."""

    ADMISSION = "admission"
    """Certain to miss when it came."""
    QUEUE = "queue"
    """Without a chance while it waited."""
    QUEUE_FULL = "queue_full"
    """Refused because there was no room to wait in."""
    DROPPED = "dropped"
    STOPPED = "stopped"
    """Stopped because its worker was certain that it would miss."""


class WorkEnding(Protocol):
    """The ending of a task or clip."""

    @property
    def outcome(self) -> Outcome: ...


class Refusable(Protocol):
    """Work that is offered: a task, or a clip."""

    refusal_sample: bool
    """Whether a decision against it was not carried out, to see what comes of it."""

    @property
    def ending(self) -> WorkEnding | None: ...

    @property
    def on_end(self) -> list[Callable[[Self], None]]: ...


T = TypeVar("T", bound=Refusable)


class RefusalStats(Generic[T]):
    """Counts decisions to refuse, and draws the sample of those that are not carried out."""

    def __init__(self, in_sample: Callable[[T], bool] = lambda task: False) -> None:
        """``in_sample`` draws whether a decision is not carried out."""
        self.in_sample = in_sample
        self.infeasible = 0
        self.refused = 0
        self.unserved: Counter[RefusalKind] = Counter()
        """Decisions that were carried out, by kind."""
        self.sampled: Counter[tuple[RefusalKind, bool]] = Counter()
        """Decisions that were not carried out, by kind and by whether the task was met."""
        self.recent_share = 0.0
        """Share of recent requests that were refused, a moving average."""

    @property
    def false_rate(self) -> float:
        """Share of sampled decisions whose task was met after all; 0 without any."""
        samples = self.sampled.total()
        met = sum(count for (_, met), count in self.sampled.items() if met)
        return met / samples if samples else 0.0

    def is_sampled(self, task: T, kind: RefusalKind) -> bool:
        """Whether a decision against ``task`` is for the sample; else it is counted as carried
        out.
        """
        if task.refusal_sample or self.in_sample(task):
            return True
        self.unserved[kind] += 1
        return False

    def refuses(self, task: T, kind: RefusalKind, *, lets_in: bool) -> bool:
        """Whether ``task`` goes, which is judged infeasible. It stays where all is let in, or as
        one of the sample; what it comes to is then counted."""
        self.infeasible += 1
        goes = not lets_in and not self.is_sampled(task, kind)
        if not goes:
            self.sample(task, kind)
        return goes

    def sample(self, task: T, kind: RefusalKind) -> None:
        """``task`` is let through; what it comes to is counted once, for the first decision."""
        if task.refusal_sample:
            return
        task.refusal_sample = True
        task.on_end.append(lambda ended: self._ended(ended, kind))

    def runs_on(self, task: T) -> bool:
        """Whether no worker is to stop ``task`` before its deadline."""
        return task.refusal_sample or self.in_sample(task)

    def stopped(self, task: T, code: Code | None, left_ms: float, *, spared: bool) -> None:
        """A worker is done with ``task``: count it if that was a stop, or would have been."""
        if spared:
            self.sample(task, RefusalKind.STOPPED)
        elif code is Code.DEADLINE_EXCEEDED and left_ms > 0:
            self.unserved[RefusalKind.STOPPED] += 1

    def _ended(self, task: T, kind: RefusalKind) -> None:
        ending = task.ending
        if ending is None or ending.outcome in (Outcome.ABORTED, Outcome.FAILED):
            return
        self.sampled[kind, ending.outcome in (Outcome.MET, Outcome.PARTIAL)] += 1

    def offered(self, *, refused: bool) -> None:
        self.refused += refused
        self.recent_share += _SMOOTHING * (refused - self.recent_share)

    def refused_late(self) -> None:
        self.refused += 1
        self.recent_share = min(1.0, self.recent_share + _SMOOTHING)


class Times(NamedTuple):
    """What is left of a request's deadlines, and what it is predicted to take. Ms from now."""

    left_ms: float
    waited_ms: float
    """How long it has waited so far."""
    least_ms: float
    """Less than that nothing that is known could do."""
    route_ms: float
    """What a worker wants to be left to start a job (DL-3)."""
    start_ms: float
    first_ms: float
    first_left_ms: float
    finish_ms: float
    gap_ms: float

    def why(self) -> tuple[str, str]:
        """Name the constraint that binds, with the sentence that says so."""
        this = f"{self.left_ms:.0f} ms remain until the deadline, and this"
        had_ms = self.left_ms + self.waited_ms
        if self.left_ms <= self.least_ms:
            binding = "route" if self.least_ms <= self.route_ms else "decode"
            if self.least_ms < had_ms:  # it would have had enough: waiting took it
                binding = "queue"
            return binding, f"{this} cannot do with less than {self.least_ms:.0f} ms"
        if self.first_left_ms < min(self.first_ms, self.left_ms):
            return "first_token", (
                f"{self.first_left_ms:.0f} ms remain until the first token is due, and it will take"
                f" about {self.first_ms:.0f} ms"
            )
        if self.finish_ms > self.left_ms:
            alone_ms = self.finish_ms - self.start_ms
            binding = "queue" if alone_ms < had_ms else "decode"
            return binding, f"{this} will take about {self.finish_ms:.0f} ms"
        if self.gap_ms < math.inf:
            return "token_gap", f"no token will come {self.gap_ms:.0f} ms after another"
        would = f"{this} would take {self.finish_ms:.0f} ms, for which others would be late"
        return "queue", would


Found = TypeVar("Found")


class _Looks:
    """The time that is left for closer looks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._left_s = LOOK_BURST_S
        self._at = clock.now()

    @property
    def are_left(self) -> bool:
        now = self._clock.now()
        self._left_s = min(LOOK_BURST_S, self._left_s + LOOK_SHARE * (now - self._at))
        self._at = now
        return self._left_s > 0

    def take(self, look: Callable[[], Found]) -> Found:
        """What ``look`` finds; the CPU time that it takes is taken off."""
        began = self._clock.cpu_s()
        found = look()
        self._left_s -= self._clock.cpu_s() - began
        return found


class Feasibility:
    """Decides on work that is certain to miss, and says why."""

    def __init__(
        self,
        forecaster: Forecaster,
        schedule: Schedule,
        promises: Promises,
        clock: Clock,
        rng: random.Random,
        config: FeasibilityConfig,
    ) -> None:
        self.stats = RefusalStats[Task](lambda task: rng.random() < config.sample)
        self._forecaster = forecaster
        self._schedule = schedule
        self._promises = promises
        self._clock = clock
        self._config = config
        self._looks = _Looks(clock)
        self._told: dict[str, Prospect] = {}
        """What was found of the last request that was refused, by model."""

    def admits(self, task: Task) -> bool:
        """Plan a newcomer; whether it is let in (DL-7)."""
        now, stats = self._clock.now(), self.stats
        self._forecaster.plan(task, now)
        if self._config.mode is AdmissionMode.OFF:
            return True
        self._schedule.offered(task)
        left_ms = task.deadline.left_ms(now)
        least_ms = self._forecaster.least_ms(task)
        looks = self._looks
        if least_ms < left_ms and not (
            looks.are_left and looks.take(partial(self.is_hopeless, task))
        ):
            stats.offered(refused=False)
            return True
        lets_in = self._config.mode is AdmissionMode.OBSERVE or self._is_capped
        refused = stats.refuses(task, RefusalKind.ADMISSION, lets_in=lets_in)
        stats.offered(refused=refused)
        if refused:
            return False
        self._forecaster.plan(task, now)
        service_log.info(
            "infeasible deadline let through",
            extra=fields(
                correlation_id=task.correlation_id,
                left_ms=round(left_ms, 1),
                least_ms=round(least_ms, 1),
            ),
        )
        return True

    def is_hopeless(self, task: Task) -> bool:
        """Whether letting ``task`` in adds less to what is met than the least chance. If it does
        not, the task keeps the number of rows that it needs (``most_rows``)."""
        least = self._config.least_chance
        if not least or task.is_promised or task.completion_tokens or task.refusal_sample:
            return False
        prospect = self._schedule.of(task, least)
        # What begins at once in a free row, and costs nobody a chance, may try its own (DL-15).
        is_idle = prospect.start_ms[-1] == 0 and prospect.gain == prospect.chance > 0
        is_hopeless = prospect.gain < least and not is_idle
        task.most_rows = math.inf if is_hopeless else min(task.most_rows, prospect.most_rows)
        return is_hopeless

    def hopeless(self, model: str) -> list[Task]:
        """Tasks of ``model`` that wait, and whose chance has fallen below the least one."""
        least = self._config.least_chance
        if not least or self._config.mode is not AdmissionMode.ENFORCE:
            return []
        chances = self._schedule.chances(model)
        low = [task for task, chance in chances.items() if chance < least]
        looks = self._looks
        return [
            task
            for task in low[-AT_ONCE:]
            if not looks.are_left or looks.take(partial(self.is_hopeless, task))
        ]

    def gives_up(self, task: Task) -> bool:
        """Whether a waiting task without a chance goes; a sample of them gets its try."""
        if self.stats.refuses(task, RefusalKind.QUEUE, lets_in=self._is_capped):
            self.stats.refused_late()
            return True
        self._forecaster.plan(task, self._clock.now())
        return False

    def samples(self, task: Task, kind: RefusalKind) -> bool:
        """Whether another decision against ``task`` is not carried out, for the sample."""
        if not self.stats.is_sampled(task, kind):
            return False
        self.stats.sample(task, kind)
        self._forecaster.plan(task, self._clock.now())
        return True

    def infeasible(self, task: Task) -> DeadlineInfeasible:
        """Why a task cannot make its deadline from here, and which one it most likely would."""
        now = self._clock.now()
        self._forecaster.plan(task, now)
        least_ms = self._forecaster.least_ms(task)
        prospect = self._prospect_of_refused(task)
        more_ms = self._promises.put_off_ms(task, prospect)
        enough_ms = self._promises.earliest_ms(task, prospect, more_ms)[LONG]
        times = Times(
            left_ms=task.deadline.left_ms(now),
            waited_ms=1000 * (now - task.marks.received) if task.marks.queued else 0.0,
            least_ms=least_ms,
            route_ms=self._forecaster.capacity_of(task.model).min_start_ms,
            start_ms=at_share(prospect.start_ms, USUAL),
            first_ms=at_share(prospect.first_ms, USUAL) + more_ms,
            first_left_ms=1000 * (task.parts.first_token_at - now),
            finish_ms=max(least_ms, at_share(prospect.end_ms, USUAL) + more_ms),
            gap_ms=1000 * task.parts.token_gap_s,
        )
        binding, why = times.why()
        return DeadlineInfeasible(
            f"{why}: come again with a deadline {enough_ms:.0f} ms from now, which will most"
            " likely be kept, or ask for less",
            predicted_finish_ms=times.finish_ms,
            earliest_feasible_unix_ms=self._promises.name(task, enough_ms),
            binding_constraint=binding,
            part=binding if binding in (Part.FIRST_TOKEN, Part.TOKEN_GAP) else "",
        )

    def _prospect_of_refused(self, task: Task) -> Prospect:
        """What ``task`` would come to; that of the one before it where there is no time to look."""
        told = self._told.get(task.model)
        if told is None or self._looks.are_left:
            look = partial(self._schedule.of, task, guesses=True)
            told = self._told[task.model] = self._looks.take(look)
        return told

    @property
    def _is_capped(self) -> bool:
        return self._config.is_capped(self.stats.recent_share)
