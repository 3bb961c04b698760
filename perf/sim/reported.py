"""Accuracy of predictions for clients: starts, retries, deadlines, fits, ends (DL-16).

The load is mixed: stated and open lengths, ``error``, ``partial`` and ``fit``, some with deadlines
that cannot be met. A client refused as infeasible retries with the deadline from the answer. Frames
from workers reach the orchestrator with a delay, as do its answers to the clients.

Figures are over all seeds, with the lowest and highest single seed; ``n`` is the sample size.
"""

import argparse
import asyncio
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final, NamedTuple

from orchestrator.errors import DeadlineInfeasible, QueueFull, TidegateError
from orchestrator.service import Orchestrator
from orchestrator.tasks.task import Task
from perf.report.bundle import Better, Figure
from perf.report.stats import percentile
from perf.sim.arrivals import Scenario, SimArrival
from perf.sim.replay.loop import VirtualClock
from perf.sim.replay.worker import SimWorker
from perf.sim.scenes import FLEET, SPEED, capacity_per_s
from perf.sim.simulate import Driver, Fleet, SimResult, WorkerEvent, new_job, simulate
from perf.sim.study import Case
from protocol import OnDeadline, Outcome
from worker.runner.synthetic import StepCost

WAY_BACK_S = 0.002
CLIENT_MS = 4.0
"""Longest time in ms that a client itself takes."""
_POLL_S = 0.005
_SHORT_MS = 20.0
"""Wait in ms, reported or real, below which pairs are not compared."""
_WARM_S: Final = 10.0
_COOL_S = 10.0
_LINGER_S = 20.0
_SLOW: Final = 10.0
_ANOTHER_PACE_S: Final = 0.5


class Pair(NamedTuple):
    """A reported time and the real one, in ms."""

    reported: float
    real: float

    @property
    def factor(self) -> float:
        """Factor between reported and real, 1 or more either way."""
        reported, real = max(1.0, self.reported), max(1.0, self.real)
        return max(reported / real, real / reported)


@dataclass(slots=True)
class Reported:
    """Reports after the warm-up, with the real times. Times in ms."""

    starts: list[Pair] = field(default_factory=list)
    retries: list[Pair] = field(default_factory=list)
    deadlines: list[Pair] = field(default_factory=list)
    """``earliest_feasible_deadline``, and when the request, come again with it, was done."""
    finishes: list[Pair] = field(default_factory=list)
    """``predicted_finish_ms``, and when the request, come again, was done."""
    deadlines_kept: int = 0
    deadlines_lost: int = 0
    fits: list[Pair] = field(default_factory=list)
    """Budgets of the answers that were shrunk, and what of each was used."""
    partial_left: list[float] = field(default_factory=list)
    """Time left of the deadline when a ``partial`` or ``fit`` answer was at its client."""

    @property
    def kept(self) -> float:
        """Share of the reported deadlines that were kept."""
        return self.deadlines_kept / max(1, self.deadlines_kept + self.deadlines_lost)

    @property
    def fit_use(self) -> float:
        """Median share of the budget that fits use; NaN of none."""
        return percentile([p.real / p.reported for p in self.fits], 50) if self.fits else math.nan

    @property
    def fit_use_p10(self) -> float:
        """Share of the budget that nine in ten fits use at least; NaN of none."""
        return percentile([p.real / p.reported for p in self.fits], 10) if self.fits else math.nan

    @property
    def fits_late(self) -> float:
        return sum(p.real > p.reported for p in self.fits) / max(1, len(self.fits))

    @property
    def partials_in_time(self) -> float:
        return sum(left >= 0 for left in self.partial_left) / max(1, len(self.partial_left))


@dataclass(frozen=True, slots=True)
class MachinePace:
    """Pace of a machine that others use, too."""

    slow_s: float = 0.0
    """Seconds at the beginning in which steps take ten times as long."""
    most: float = 1.0
    """Factor by which steps are longer at most; each half second has another."""

    def events(self, usual: StepCost, until_s: float) -> dict[float, WorkerEvent]:
        """What happens to the workers, by time, until that one."""

        def take(factor: float) -> WorkerEvent:
            cost = StepCost(
                factor * usual.step_s, factor * usual.row_s, factor * usual.prompt_token_s
            )

            def happen(workers: list[SimWorker]) -> None:
                for worker in workers:
                    worker.runner.cost = cost

            return happen

        found, at_s, rng = {self.slow_s: take(1.0)}, self.slow_s, random.Random(0)
        if self.slow_s:
            found[0.0] = take(_SLOW)
        while self.most > 1.0 and at_s < until_s:
            found[at_s] = take(rng.uniform(1.0, self.most))
            at_s += _ANOTHER_PACE_S
        return found


ALONE: Final = MachinePace()


def median_ratio(pairs: Iterable[Pair]) -> float:
    """Median of reported over real; NaN of none."""
    ratios = [pair.reported / max(1.0, pair.real) for pair in pairs]
    return percentile(ratios, 50) if ratios else math.nan


def mixed(arrivals: Iterable[SimArrival], seed: int) -> list[SimArrival]:
    """Arrivals with wishes of all kinds: some end cleanly, some want what nobody could do."""
    rng, made = random.Random(seed), []
    for arrival in arrivals:
        drawn = rng.random()
        if drawn < 0.15:
            arrival = replace(arrival, on_deadline=OnDeadline.PARTIAL)
        elif drawn < 0.3:
            # Wants as much as there is time for.
            much = max(arrival.max_tokens, round(3 * arrival.deadline_ms / SPEED.token_ms))
            most = min(1024, much)
            arrival = replace(arrival, on_deadline=OnDeadline.FIT, max_tokens=most, length=most)
        elif drawn < 0.4 and not arrival.is_open:
            service_ms = SPEED.service_ms(arrival.prompt_tokens, arrival.length)
            arrival = replace(arrival, deadline_ms=0.3 * service_ms + 20.0)
        made.append(arrival)
    return made


def measure(
    arrivals: Iterable[SimArrival],
    fleet: Fleet,
    settings: Mapping[str, str],
    *,
    seed: int,
    warm_s: float = _WARM_S,
    cool_s: float = _COOL_S,
    pace: MachinePace = ALONE,
) -> Reported:
    """Compare what arrives after ``warm_s`` and until ``cool_s`` before the last one.

    The load continues for a while after what is counted: what is reported is of a load that lasts.
    """
    arrivals, fleet = (
        list(arrivals),
        replace(fleet, spec=replace(fleet.spec, way_back_s=WAY_BACK_S)),
    )
    end_s = arrivals[-1].at_s
    drivers: list[AskingDriver] = []

    def new_driver(*given: Any) -> AskingDriver:
        driver = AskingDriver(*given)
        driver.counted_s = (warm_s, end_s - cool_s)
        driver.floor_ms = 1000 * fleet.spec.min_start_s
        driver.rng = random.Random(seed)
        drivers.append(driver)
        return driver

    simulate(
        arrivals,
        fleet,
        settings,
        seed=seed,
        events=pace.events(fleet.spec.cost, end_s + _LINGER_S),
        linger_s=_LINGER_S,
        new_driver=new_driver,
    )
    return drivers[0].reported


class AskingDriver(Driver):
    """Submits arrivals as clients that go by what they are told: who is refused comes again."""

    floor_ms = 0.0
    """With less than that left nothing starts at a worker, however short (DL-3)."""
    counted_s = (0.0, math.inf)

    def __init__(
        self, orchestrator: Orchestrator, clock: VirtualClock, states_deadline: bool
    ) -> None:
        super().__init__(orchestrator, clock, states_deadline)
        self.reported = Reported()
        self.rng = random.Random(0)
        self._starts_ms: dict[Task, float] = {}

    def accepted(self, task: Task) -> None:
        self._starts_ms[task] = self.orchestrator.questions.predicted_start_ms(task)

    async def submit(self, arrival: SimArrival, result: SimResult, name: str) -> None:
        await self._ask_once(arrival, result, None)

    async def _ask_once(
        self, arrival: SimArrival, result: SimResult, again: DeadlineInfeasible | None
    ) -> None:
        """Ask; ``again``: with the deadline that this refusal named."""
        now, reported, clock = self.clock.now(), self.reported, self.clock
        counts = self.counted_s[0] <= now < self.counted_s[1]
        job, prompt = new_job(arrival, now, arrival.deadline_ms)
        unix_ms = round(1000 * clock.unix() + arrival.deadline_ms)
        job = replace(job, deadline=replace(job.deadline, unix_ms=unix_ms))
        task = await self.ask(job, prompt, result)
        took_ms = 1000 * (clock.now() - now)
        if isinstance(task, QueueFull):
            while self.orchestrator.queue.full:  # noqa: ASYNC110 - the queue has no event for it
                await asyncio.sleep(_POLL_S)
            if counts:
                reported.retries.append(Pair(task.retry_after_ms, 1000 * (clock.now() - now)))
            return
        error = task if isinstance(task, TidegateError) else task.ending and task.ending.error
        if isinstance(task, Task):
            start = Pair(self._starts_ms.pop(task), 1000 * (task.marks.dispatched - now))
            if task.marks.dispatched and counts and max(start) >= _SHORT_MS:
                reported.starts.append(start)
            took_ms += self.rng.uniform(0.0, CLIENT_MS)
        if isinstance(error, DeadlineInfeasible):
            if again is not None:
                reported.deadlines_lost += counts
                return
            at = error.details["earliest_feasible_deadline"]
            assert isinstance(at, int)
            later = replace(arrival, deadline_ms=at - 1000 * clock.unix())
            self.spawn(self._ask_once(later, SimResult(later), error))
        elif isinstance(task, Task) and counts:
            self._count(arrival, again, task, took_ms)

    def _count(
        self, arrival: SimArrival, again: DeadlineInfeasible | None, task: Task, took_ms: float
    ) -> None:
        reported, ending = self.reported, task.ending
        assert ending is not None
        if again is not None and ending.outcome is not Outcome.FAILED:
            if ending.outcome is not Outcome.MET:
                reported.deadlines_lost += 1
                return
            reported.deadlines_kept += 1
            reported.deadlines.append(Pair(arrival.deadline_ms, max(self.floor_ms, took_ms)))
            finish_ms = again.details["predicted_finish_ms"]
            assert isinstance(finish_ms, float)
            reported.finishes.append(Pair(finish_ms, took_ms))
        elif arrival.on_deadline is not OnDeadline.ERROR and task.completion_tokens:
            is_cut = ending.outcome is Outcome.PARTIAL
            if is_cut or task.fitted_tokens == task.completion_tokens:
                reported.partial_left.append(arrival.deadline_ms - took_ms)
            if task.fitted_tokens is not None:
                reported.fits.append(Pair(arrival.deadline_ms, took_ms))


MIXED: Final = Scenario(SPEED, open_share=0.5)


@dataclass(frozen=True, slots=True)
class ReportedScene:
    """Load and machine; what is reported from ``_WARM_S`` on counts."""

    name: str
    what: str
    load: float
    """Multiples of the capacity of a machine that nobody else uses."""
    pace: MachinePace = ALONE
    max_waiting: int = -1

    def measure(self, capacity: float, seconds: float, seed: int, fleet: Fleet = FLEET) -> Reported:
        """Reports of one seed; ``capacity`` in requests per second, of ``fleet``."""
        arrivals = mixed(MIXED.arrivals(self.load * capacity, seconds, seed), seed)
        settings = {"QUEUE__MAX_WAITING": str(self.max_waiting)}
        return measure(arrivals, fleet, settings, seed=seed, pace=self.pace)


SCENES: Final = {
    scene.name: scene
    for scene in (
        ReportedScene("calm", "0.3 times the capacity", 0.3),
        ReportedScene("busy", "the same, steps up to twice as long", 0.3, MachinePace(most=2.0)),
        ReportedScene(
            "slow-start",
            "the same, steps ten times as long until it counts",
            0.3,
            MachinePace(slow_s=_WARM_S),
        ),
        ReportedScene("overload", "1.5 times the capacity", 1.5),
        ReportedScene("full-queue", "the same, at most 8 wait", 1.5, max_waiting=8),
    )
}


def pooled(runs: Iterable[Reported]) -> Reported:
    """All reports of several runs."""
    whole = Reported()
    for run in runs:
        for each in fields(Reported):
            setattr(whole, each.name, getattr(whole, each.name) + getattr(run, each.name))
    return whole


class _Report(NamedTuple):
    """Value of a run's reports, and the number of things that it is of."""

    label: str
    value: Callable[[Reported], float]
    number: Callable[[Reported], int]
    better: Better = "neither"


def _fits(reported: Reported) -> int:
    return len(reported.fits)


_REPORTS: Final = {
    "fit_use": _Report("fit: share of its time used", lambda r: r.fit_use, _fits, "higher"),
    "fit_use_p10": _Report("fit: used by nine in ten", lambda r: r.fit_use_p10, _fits, "higher"),
    "fits_late": _Report("fit: share late", lambda r: r.fits_late, _fits, "lower"),
    "partials_in_time": _Report(
        "partial: share in time",
        lambda r: r.partials_in_time,
        lambda r: len(r.partial_left),
        "higher",
    ),
    "deadlines_kept": _Report(
        "deadlines that were named: share kept",
        lambda r: r.kept,
        lambda r: r.deadlines_kept + r.deadlines_lost,
        "higher",
    ),
    "deadlines": _Report(
        "deadlines that were named, over what it took",
        lambda r: median_ratio(r.deadlines),
        lambda r: len(r.deadlines),
    ),
    "starts": _Report(
        "starts: told over real", lambda r: median_ratio(r.starts), lambda r: len(r.starts)
    ),
    "retries": _Report(
        "Retry-After over the time until there is room",
        lambda r: median_ratio(r.retries),
        lambda r: len(r.retries),
    ),
}


def figures_of(name: str, runs: Sequence[Reported]) -> Iterator[Figure]:
    """Figures of a scene: of all runs together, from the lowest run's to the highest's."""
    whole = pooled(runs)
    for key, report in _REPORTS.items():
        by_run = [report.value(run) for run in runs if report.number(run)]
        if by_run:
            yield Figure(
                key=f"{name}.{key}",
                label=report.label,
                unit="",
                median=report.value(whole),
                low=min(by_run),
                high=max(by_run),
                spread="min–max",
                n=report.number(whole),
                better=report.better,
            )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scenes", nargs="+", choices=list(SCENES), default=list(SCENES))
    parser.set_defaults(seeds=5)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """A case for each scene."""
    capacity = capacity_per_s(MIXED, FLEET, 1)
    for name in args.scenes:

        def figures(name: str = name) -> Iterator[Figure]:
            seeds = range(1, args.seeds + 1)
            runs = [SCENES[name].measure(capacity, args.seconds or 60.0, seed) for seed in seeds]
            return figures_of(name, runs)

        yield Case(name, f"{name}: {SCENES[name].what}", figures)
