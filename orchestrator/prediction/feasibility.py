"""Decides whether a deadline will be missed, and refuses such work (DL-7, DL-17).

Work is refused on arrival or while it waits if it is certain to miss, or if it adds less than the
least chance to the met requests (``schedule``). For each kind of decision that ends a request
unserved, a random sample is not carried out: a sampled task runs until its deadline. The share of
the sample that is met is the rate of false refusals.
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
from orchestrator.prediction.answer_length import HALF_LIFE
from orchestrator.prediction.forecast import at_share
from orchestrator.prediction.forecaster import LONG, USUAL, Forecaster
from orchestrator.prediction.promises import Promises
from orchestrator.prediction.schedule import Prospect, Schedule
from orchestrator.prediction.step_learner import USUAL_S
from orchestrator.queue.task_queue import AT_ONCE
from orchestrator.tasks.deadline import Part
from orchestrator.tasks.task import Task
from orchestrator.telemetry.log import fields, service_log
from protocol import Code, Outcome

LOOK_SHARE = 0.05
"""Share of the event loop's CPU time for closer looks, averaged over ``USUAL_S``. Each look
simulates the schedule a few times; further requests are examined together, while they wait. At
twice the capacity of the demo model, with engine and clients on the same two cores, 0.03, 0.06, 0.1
and 0.25 met 43, 48, 43 and 35 %, and told 46, 38, 31 and 17 % of the others by half of their
deadline (with a least chance of 0.3; means of eight runs of 240 or 480 requests, six of the
last)."""


class AdmissionMode(StrEnum):
    """How the service treats work that is certain to miss its deadline."""

    ENFORCE = "enforce"
    OBSERVE = "observe"
    """Admit work that is certain to miss, and count it."""
    OFF = "off"


REFUSAL_SAMPLE: Final = 0.01
"""Share of decisions that end a request unserved, infeasibility refusals included, that are not
carried out, to measure how many are wrong (DL-17)."""


@dataclass(frozen=True, slots=True)
class FeasibilityConfig:
    """Settings of refusals."""

    mode: AdmissionMode
    least_chance: float
    """Chance (0 to 1) below which work is refused; 0 refuses only work that is certain to miss."""
    refusal_cap: float
    """Largest share of recent requests (the last 200 or so) that is refused as infeasible."""
    sample: float
    """Share of refusals that is not carried out, to measure how many would have been wrong."""

    def is_capped(self, recent_share: float) -> bool:
        """Whether refusals have reached the cap, so that all work is admitted."""
        return self.refusal_cap < 1 and recent_share >= self.refusal_cap


class RefusalKind(StrEnum):
    """Kinds of decisions of the service that end a request unserved."""

    ADMISSION = "admission"
    """Refused on arrival: certain to miss."""
    QUEUE = "queue"
    """Refused while it waited: it had no chance left."""
    QUEUE_FULL = "queue_full"
    """Refused because the queue was full."""
    DROPPED = "dropped"
    STOPPED = "stopped"
    """Stopped by its worker, which was certain that it would miss."""


class WorkEnding(Protocol):
    """The ending of a task or clip."""

    @property
    def outcome(self) -> Outcome: ...


class Refusable(Protocol):
    """Submitted work: a task or a clip."""

    refusal_sample: bool
    """Whether a decision against it was not carried out, to learn its outcome."""

    @property
    def ending(self) -> WorkEnding | None: ...

    @property
    def on_end(self) -> list[Callable[[Self], None]]: ...


T = TypeVar("T", bound=Refusable)


class RefusalStats(Generic[T]):
    """Counts refusals, and draws the sample that is not carried out."""

    def __init__(self, in_sample: Callable[[T], bool] = lambda task: False) -> None:
        """``in_sample`` decides at random whether a decision is not carried out."""
        self.in_sample = in_sample
        self.infeasible = 0
        self.refused = 0
        self.unserved: Counter[RefusalKind] = Counter()
        """Decisions that were carried out, by kind."""
        self.sampled: Counter[tuple[RefusalKind, bool]] = Counter()
        """Decisions that were not carried out, by kind and by whether the task was met."""
        self.recent_share = 0.0
        """Moving average of the share of requests that were refused."""

    @property
    def false_rate(self) -> float:
        """Share of sampled decisions whose task was met after all; 0 without any."""
        samples = self.sampled.total()
        met = sum(count for (_, met), count in self.sampled.items() if met)
        return met / samples if samples else 0.0

    def is_sampled(self, task: T, kind: RefusalKind) -> bool:
        """Whether a decision against ``task`` is in the sample; if not, count it as carried out."""
        if task.refusal_sample or self.in_sample(task):
            return True
        self.unserved[kind] += 1
        return False

    def refuses(self, task: T, kind: RefusalKind, *, lets_in: bool) -> bool:
        """Whether to refuse ``task``, which was judged infeasible. It stays if all work is admitted
        (``lets_in``) or if it is in the sample; its outcome is then counted."""
        self.infeasible += 1
        goes = not lets_in and not self.is_sampled(task, kind)
        if not goes:
            self.sample(task, kind)
        return goes

    def sample(self, task: T, kind: RefusalKind) -> None:
        """Let ``task`` through. Its outcome is counted once, for the first decision."""
        if task.refusal_sample:
            return
        task.refusal_sample = True
        task.on_end.append(lambda ended: self._ended(ended, kind))

    def runs_on(self, task: T) -> bool:
        """Whether workers must not stop ``task`` before its deadline."""
        return task.refusal_sample or self.in_sample(task)

    def stopped(self, task: T, code: Code | None, left_ms: float, *, spared: bool) -> None:
        """Count an ended ``task`` if its worker stopped it, or would have stopped it."""
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
        self.recent_share += (refused - self.recent_share) / HALF_LIFE

    def refused_late(self) -> None:
        self.refused += 1
        self.recent_share = min(1.0, self.recent_share + 1 / HALF_LIFE)


class Times(NamedTuple):
    """A request's remaining time and predicted times, in ms from now."""

    left_ms: float
    waited_ms: float
    """Its wait so far."""
    least_ms: float
    """The least time that it needs, for certain."""
    route_ms: float
    """The least remaining time with which a worker starts a job (DL-3)."""
    start_ms: float
    first_ms: float
    first_left_ms: float
    finish_ms: float
    gap_ms: float

    def why(self) -> tuple[str, str]:
        """The constraint that binds, and a sentence for the client."""
        this = f"{self.left_ms:.0f} ms remain until the deadline, and this"
        had_ms = self.left_ms + self.waited_ms
        if self.left_ms <= self.least_ms:
            binding = "route" if self.least_ms <= self.route_ms else "decode"
            if self.least_ms < had_ms:  # it would have had enough: waiting took it
                binding = "queue"
            return binding, f"{this} needs at least {self.least_ms:.0f} ms"
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
            return "token_gap", f"tokens cannot come {self.gap_ms:.0f} ms apart"
        would = f"{this} would take {self.finish_ms:.0f} ms and make others late"
        return "queue", would


Found = TypeVar("Found")


class _Looks:
    """The CPU time budget of closer looks: a share of the last ``USUAL_S`` seconds."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._left_s = LOOK_SHARE * USUAL_S
        self._at = clock.now()

    @property
    def are_left(self) -> bool:
        now = self._clock.now()
        self._left_s = min(LOOK_SHARE * USUAL_S, self._left_s + LOOK_SHARE * (now - self._at))
        self._at = now
        return self._left_s > 0

    def take(self, look: Callable[[], Found]) -> Found:
        """Call ``look`` and return its result; its CPU time is deducted from the budget."""
        began = self._clock.cpu_s()
        found = look()
        self._left_s -= self._clock.cpu_s() - began
        return found


class Feasibility:
    """Decides which work is refused as infeasible, and explains the refusal."""

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
        """The prospect of the last refused request, by model."""

    def admits(self, task: Task) -> bool:
        """Plan a new task. Returns whether it is admitted (DL-7)."""
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
        """Whether admitting ``task`` adds less than the least chance to the met requests. If not,
        the task keeps the number of rows that it needs (``most_rows``)."""
        least = self._config.least_chance
        if not least or task.is_promised or task.completion_tokens or task.refusal_sample:
            return False
        prospect = self._schedule.of(task, least)
        # A task that starts at once in a free row and lowers nobody's chance may try (DL-15).
        is_idle = prospect.start_ms[-1] == 0 and prospect.gain == prospect.chance > 0
        is_hopeless = prospect.gain < least and not is_idle
        task.most_rows = math.inf if is_hopeless else min(task.most_rows, prospect.most_rows)
        return is_hopeless

    def hopeless(self, model: str) -> list[Task]:
        """Waiting tasks of ``model`` whose chance has fallen below the least chance."""
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
        """Whether to refuse a waiting task that has no chance; a sample of them may still run."""
        if self.stats.refuses(task, RefusalKind.QUEUE, lets_in=self._is_capped):
            self.stats.refused_late()
            return True
        self._forecaster.plan(task, self._clock.now())
        return False

    def samples(self, task: Task, kind: RefusalKind) -> bool:
        """Whether a decision of another ``kind`` is not carried out, for the sample."""
        if not self.stats.is_sampled(task, kind):
            return False
        self.stats.sample(task, kind)
        self._forecaster.plan(task, self._clock.now())
        return True

    def infeasible(self, task: Task) -> DeadlineInfeasible:
        """The error for a task that will miss its deadline; it names one that will likely be
        kept."""
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
            f"{why}: retry with a deadline {enough_ms:.0f} ms from now, which will most likely be"
            " kept, or ask for less",
            predicted_finish_ms=times.finish_ms,
            earliest_feasible_unix_ms=self._promises.name(task, enough_ms),
            binding_constraint=binding,
            part=binding if binding in (Part.FIRST_TOKEN, Part.TOKEN_GAP) else "",
        )

    def _prospect_of_refused(self, task: Task) -> Prospect:
        """The prospect of ``task``; if no CPU time is left, that of the last refused task."""
        told = self._told.get(task.model)
        if told is None or self._looks.are_left:
            look = partial(self._schedule.of, task, guesses=True)
            told = self._told[task.model] = self._looks.take(look)
        return told

    @property
    def _is_capped(self) -> bool:
        return self._config.is_capped(self.stats.recent_share)
