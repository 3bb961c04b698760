"""Reports to clients beside what comes of them: starts, retries, deadlines, fits, ends (DL-16).

    python -m perf.sim.reported [--seconds 60] [--seed N]

The load is mixed: stated and open lengths, ``error``, ``partial`` and ``fit``, some with deadlines
that nobody could keep. Whoever is refused as infeasible comes back with the deadline that it was
told. Frames from workers take a while to the orchestrator, and its answers to the clients.
"""

import argparse
import asyncio
import math
import random
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from orchestrator.errors import DeadlineInfeasible, QueueFull, TidegateError
from orchestrator.tasks.task import Task
from perf.load.workload import Sizes
from perf.report.stats import percentile
from perf.sim.__main__ import FLEET, SPEED, capacity_per_s
from perf.sim.arrivals import Scenario, SimArrival
from perf.sim.scenes import STEP_COST
from perf.sim.simulate import Fleet, new_job, new_orchestrator
from pool.replay.loop import VirtualClock, VirtualLoop, run_quietly
from pool.replay.worker import WorkerSpec
from worker.protocol import Delta, OnDeadline, Outcome

WAY_BACK_S = 0.002
CLIENT_MS = 4.0
"""Longest time in ms that a client itself takes."""
_POLL_S = 0.005
_SHORT_MS = 20.0
"""Wait in ms, reported or real, below which pairs are not compared."""
_WARM_S = 10.0
_COOL_S = 10.0
_LINGER_S = 20.0


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
    fits_cut: int = 0
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
    def fits_late(self) -> float:
        return sum(p.real > p.reported for p in self.fits) / max(1, len(self.fits))

    @property
    def partials_in_time(self) -> float:
        return sum(left >= 0 for left in self.partial_left) / max(1, len(self.partial_left))


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
) -> Reported:
    """Compare what arrives after ``warm_s`` and until ``cool_s`` before the last one.

    The load goes on for a while after what is counted: what is reported is of a load that goes on.
    """
    return run_quietly(
        lambda loop: _measure(
            loop, list(arrivals), fleet, settings, random.Random(seed), warm_s, cool_s
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
) -> Reported:
    clock = VirtualClock(loop)
    fleet = replace(fleet, spec=replace(fleet.spec, way_back_s=WAY_BACK_S))
    parts, _ = new_orchestrator(fleet, clock, settings, rng)
    orchestrator = parts.orchestrator
    parts.lifecycle.start()
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
                reported.fits_cut += is_cut

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
    for task in running:
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


def _off(pairs: list[Pair]) -> str:
    """Median of reported over real, the median factor of single pairs, and their number."""
    return f"{median_ratio(pairs):.2f} (each x{median_factor(pairs):.2f} of {len(pairs)})"


FEW_LONG = Fleet(WorkerSpec(STEP_COST, 2, kv_tokens=4096), count=1)
LONG = Scenario(
    SPEED,
    answers=Sizes(median=120, sigma=0.5, least=40, most=400),
    patience=(6.0, 12.0),
    open_share=1.0,
)
"""Scenario of long answers of unknown length, which hold all of few slots."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=60.0, help="of load, ends included")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.3, 0.8, 1.0, 1.6])
    parser.add_argument("--seed", type=int, default=20240229)
    args = parser.parse_args()
    scenario = Scenario(SPEED, open_share=0.5)
    cells = []
    for name, some, fleet in (("mixed", scenario, FLEET), ("few long", LONG, FEW_LONG)):
        capacity = capacity_per_s(some, fleet, args.seed)
        for load in args.loads:
            arrivals = some.arrivals(load * capacity, args.seconds, args.seed)
            many = mixed(arrivals, args.seed) if name == "mixed" else list(arrivals)
            for queue in ("-1", "8"):
                cells.append((f"{name} {load:g} x, queue {queue}", many, fleet, queue))
    for name, many, fleet, queue in cells:
        it = measure(many, fleet, {"QUEUE__MAX_WAITING": queue}, seed=args.seed)
        print(
            f"{name:28} starts {_off(it.starts)}, retry {_off(it.retries)},"
            f" deadlines kept {100 * it.kept:.1f} % at {median_ratio(it.deadlines):.2f}"
            f" ({len(it.deadlines)}), finish x{median_factor(it.finishes):.2f},"
            f" fit uses {100 * it.fit_use:.0f} %, late {100 * it.fits_late:.2f} %,"
            f" cut {it.fits_cut}/{len(it.fits)},"
            f" partial in time {100 * it.partials_in_time:.2f} % ({len(it.partial_left)})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
