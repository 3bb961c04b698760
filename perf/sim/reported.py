"""Reports to clients beside what comes of them: starts, retries, deadlines, fits, ends (DL-16).

    python -m perf.sim.reported [--seconds 60] [--seeds N] [--scenes NAME …]

The load is mixed: stated and open lengths, ``error``, ``partial`` and ``fit``, some with deadlines
that nobody could keep. Whoever is refused as infeasible comes back with the deadline that it was
told. Frames from workers take a while to the orchestrator, and its answers to the clients.

Figures are of all seeds together, with the lowest and highest of a seed; ``n`` counts what they are
of.
"""

import asyncio
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Final, NamedTuple

from orchestrator.errors import DeadlineInfeasible, QueueFull, TidegateError
from orchestrator.tasks.task import Task
from perf.load.workload import Sizes
from perf.report.bundle import BenchResult, Better, Figure
from perf.report.command import begin, new_console, new_parser, result
from perf.report.stats import percentile
from perf.sim.__main__ import FLEET, SPEED, capacity_per_s
from perf.sim.arrivals import Scenario, SimArrival
from perf.sim.replay.loop import VirtualClock, VirtualLoop, run_quietly
from perf.sim.replay.worker import SimWorker, WorkerSpec
from perf.sim.scenes import STEP_COST
from perf.sim.simulate import Fleet, new_job, new_orchestrator
from protocol import Delta, OnDeadline, Outcome
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

    async def follow(self, workers: Sequence[SimWorker], rng: random.Random) -> None:
        """Make the workers' steps as long as the pace says, for good."""
        usual = workers[0].runner.cost

        def take(factor: float) -> None:
            for worker in workers:
                worker.runner.cost = StepCost(
                    factor * usual.step_s, factor * usual.row_s, factor * usual.prompt_token_s
                )

        if self.slow_s:
            take(_SLOW)
            await asyncio.sleep(self.slow_s)
        take(1.0)
        while self.most > 1.0:
            take(rng.uniform(1.0, self.most))
            await asyncio.sleep(_ANOTHER_PACE_S)


ALONE: Final = MachinePace()


def median_factor(pairs: Iterable[Pair]) -> float:
    """Median factor between reported and real, 1 or more either way; NaN of none."""
    factors = [pair.factor for pair in pairs]
    return percentile(factors, 50) if factors else math.nan


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

    The load goes on for a while after what is counted: what is reported is of a load that goes on.
    """
    return run_quietly(
        lambda loop: _measure(
            loop, list(arrivals), fleet, settings, random.Random(seed), warm_s, cool_s, pace
        )
    )


async def _measure(
    loop: VirtualLoop,
    arrivals: list[SimArrival],
    fleet: Fleet,
    settings: Mapping[str, str],
    rng: random.Random,
    warm_s: float,
    cool_s: float,
    pace: MachinePace,
) -> Reported:
    clock = VirtualClock(loop)
    fleet = replace(fleet, spec=replace(fleet.spec, way_back_s=WAY_BACK_S))
    parts, workers = new_orchestrator(fleet, clock, settings, rng)
    orchestrator = parts.orchestrator
    parts.lifecycle.start()
    pacing = asyncio.ensure_future(pace.follow(workers, random.Random(0)))
    reported = Reported()
    counts_until = arrivals[-1].at_s - cool_s
    running: set[asyncio.Task[None]] = set()

    def spawn(arrival: SimArrival, again: DeadlineInfeasible | None = None) -> None:
        task = asyncio.ensure_future(client(arrival, again))
        running.add(task)
        task.add_done_callback(running.discard)

    async def client(arrival: SimArrival, again: DeadlineInfeasible | None) -> None:
        now = clock.now()
        counts = warm_s <= now < counts_until
        job, prompt = new_job(arrival, now, arrival.deadline_ms)
        unix_ms = round(1000 * clock.unix() + arrival.deadline_ms)
        job = replace(job, deadline=replace(job.deadline, unix_ms=unix_ms))
        listener = _EndListener()
        try:
            task = await orchestrator.submit(job, prompt, [listener])
        except DeadlineInfeasible as error:
            refused(arrival, again, error, counts)
            return
        except QueueFull as error:
            while orchestrator.queue.full:  # noqa: ASYNC110 - the queue has no event for it
                await asyncio.sleep(_POLL_S)
            if counts:
                reported.retries.append(Pair(error.retry_after_ms, 1000 * (clock.now() - now)))
            return
        except TidegateError:
            return
        start_ms = orchestrator.predicted_start_ms(task)
        await listener.is_over.wait()
        ending = task.ending
        assert ending is not None
        if task.marks.dispatched and counts:
            start = Pair(start_ms, 1000 * (task.marks.dispatched - now))
            if max(start) >= _SHORT_MS:
                reported.starts.append(start)
        took_ms = 1000 * (clock.now() - now) + rng.uniform(0.0, CLIENT_MS)
        if isinstance(ending.error, DeadlineInfeasible):
            refused(arrival, again, ending.error, counts)
            return
        if again is not None and counts and ending.outcome is not Outcome.FAILED:
            if ending.outcome is Outcome.MET:
                reported.deadlines_kept += 1
                # With less than a worker's floor left nothing starts, however short (DL-3).
                floor_ms = 1000 * fleet.spec.min_start_s
                reported.deadlines.append(Pair(arrival.deadline_ms, max(floor_ms, took_ms)))
                finish_ms = again.details["predicted_finish_ms"]
                assert isinstance(finish_ms, float)
                reported.finishes.append(Pair(finish_ms, took_ms))
            else:
                reported.deadlines_lost += 1
        elif counts and arrival.on_deadline is not OnDeadline.ERROR and task.completion_tokens:
            is_cut = ending.outcome is Outcome.PARTIAL
            if is_cut or task.fitted_tokens == task.completion_tokens:
                reported.partial_left.append(arrival.deadline_ms - took_ms)
            if task.fitted_tokens is not None:
                reported.fits.append(Pair(arrival.deadline_ms, took_ms))

    def refused(
        arrival: SimArrival,
        again: DeadlineInfeasible | None,
        error: DeadlineInfeasible,
        counts: bool,
    ) -> None:
        if again is not None:
            reported.deadlines_lost += counts
            return
        at = error.details["earliest_feasible_deadline"]
        assert isinstance(at, int)
        left_ms = at - 1000 * clock.unix()
        spawn(replace(arrival, deadline_ms=left_ms), error)

    for arrival in arrivals:
        loop.call_at(arrival.at_s, spawn, arrival)
    await asyncio.sleep(arrivals[-1].at_s + _LINGER_S - clock.now())
    await parts.lifecycle.drain(0.0)
    await parts.lifecycle.close()
    for task in (pacing, *running):
        task.cancel()
    return reported


class _EndListener:
    """Records a task's end."""

    def __init__(self) -> None:
        self.is_over = asyncio.Event()

    def started(self, task: Task) -> None:
        """Ignore the start: the task's marks have it."""

    def tokens(self, task: Task, delta: Delta) -> None:
        """Ignore the tokens: the task's count has them."""

    def ended(self, task: Task) -> None:
        self.is_over.set()


FEW_LONG = Fleet(WorkerSpec(STEP_COST, 2, kv_tokens=4096), count=1)
LONG = Scenario(
    SPEED,
    answers=Sizes(median=120, sigma=0.5, least=40, most=400),
    patience=(6.0, 12.0),
    open_share=1.0,
)
"""Scenario of long answers of unknown length, which hold all of few slots."""
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

    key: str
    label: str
    value: Callable[[Reported], float]
    number: Callable[[Reported], int]
    better: Better


def _fits(reported: Reported) -> int:
    return len(reported.fits)


_REPORTS: Final = (
    _Report("fit_use", "fit: share of its time used", lambda r: r.fit_use, _fits, "higher"),
    _Report("fit_use_p10", "fit: used by nine in ten", lambda r: r.fit_use_p10, _fits, "higher"),
    _Report("fits_late", "fit: share late", lambda r: r.fits_late, _fits, "lower"),
    _Report(
        "partials_in_time",
        "partial: share in time",
        lambda r: r.partials_in_time,
        lambda r: len(r.partial_left),
        "higher",
    ),
    _Report(
        "deadlines_kept",
        "deadlines that were named: share kept",
        lambda r: r.kept,
        lambda r: r.deadlines_kept + r.deadlines_lost,
        "higher",
    ),
    _Report(
        "deadlines",
        "deadlines that were named, over what it took",
        lambda r: median_ratio(r.deadlines),
        lambda r: len(r.deadlines),
        "neither",
    ),
    _Report(
        "starts",
        "starts: told over real",
        lambda r: median_ratio(r.starts),
        lambda r: len(r.starts),
        "neither",
    ),
    _Report(
        "retries",
        "Retry-After over the time until there is room",
        lambda r: median_ratio(r.retries),
        lambda r: len(r.retries),
        "neither",
    ),
)


def figures_of(name: str, runs: Sequence[Reported]) -> Iterator[Figure]:
    """Figures of a scene: of all runs together, from the lowest run's to the highest's."""
    whole = pooled(runs)
    for report in _REPORTS:
        by_run = [report.value(run) for run in runs if report.number(run)]
        if by_run:
            yield Figure(
                key=f"{name}.{report.key}",
                label=report.label,
                unit="",
                median=report.value(whole),
                low=min(by_run),
                high=max(by_run),
                spread="min–max",
                n=report.number(whole),
                better=report.better,
            )


def main(argv: Sequence[str]) -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--scenes", nargs="+", choices=list(SCENES), default=list(SCENES))
    parser.add_argument("--seconds", type=float, default=60.0, metavar="S", help="of load")
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="from 1 on")
    args = parser.parse_args(argv)
    recording, console = begin(parser, args, "perf.sim.reported", *argv, seed=1), new_console()
    capacity = capacity_per_s(MIXED, FLEET, 1)
    results: list[BenchResult] = []
    for name in args.scenes:
        scene = SCENES[name]
        with result(results, name, f"{name}: {scene.what}") as figures:
            seeds = range(1, args.seeds + 1)
            figures += figures_of(
                name, [scene.measure(capacity, args.seconds, seed) for seed in seeds]
            )
        console.print(results[-1].what, results[-1].failed, style="bold")
        for one in figures:
            spread = f"({one.low:.3f} … {one.high:.3f})"
            console.print(f"{one.label}: {one.median:.3f} {spread}, of {one.n}")
    recording.save(recording.bundle(results))
    return 1 if any(one.failed for one in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
