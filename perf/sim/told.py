"""What clients are told, beside what came of it: starts, retries, deadlines, fits, ends (DL-16).

    python -m perf.sim.told [--seconds 60] [--seed N]

The load is mixed: stated and open lengths, ``error``, ``partial`` and ``fit``, some with deadlines
that nobody could keep. Whoever is refused as infeasible comes back with the deadline that it was
told. News from workers take a while to the orchestrator, and its answers to the clients.
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
from perf.sim.campaign import PACE
from perf.sim.loop import VirtualClock, VirtualLoop
from perf.sim.offers import Offer, Scenario
from perf.sim.run import Fleet, new_job, new_orchestrator
from perf.sim.worker import WorkerSpec
from worker.protocol import Delta, OnDeadline, Outcome

WAY_BACK_S = 0.002
CLIENT_MS = 4.0
"""The client's own time, at most."""
_POLL_S = 0.005
_SHORT_MS = 20.0
"""Shorter waits, told and real, are not compared."""
_WARM_S = 10.0
_COOL_S = 10.0
_LINGER_S = 20.0


class Pair(NamedTuple):
    """Both in ms."""

    told: float
    real: float

    @property
    def factor(self) -> float:
        """How far off, either way."""
        told, real = max(1.0, self.told), max(1.0, self.real)
        return max(told / real, real / told)


@dataclass(slots=True)
class Told:
    """All that was told after the warm-up. Times in ms."""

    starts: list[Pair] = field(default_factory=list)
    retries: list[Pair] = field(default_factory=list)
    deadlines: list[Pair] = field(default_factory=list)
    """``earliest_feasible_deadline`` and when the request, come again with it, was done."""
    finishes: list[Pair] = field(default_factory=list)
    """``predicted_finish_ms``, and the same."""
    deadlines_kept: int = 0
    deadlines_lost: int = 0
    fits: list[Pair] = field(default_factory=list)
    """The budget, and what of it was used, of those that were shrunk."""
    fits_cut: int = 0
    partial_left: list[float] = field(default_factory=list)
    """Of the deadline, when a ``partial`` or ``fit`` answer was at its client."""

    @property
    def kept(self) -> float:
        """Share of deadlines told that were kept."""
        return self.deadlines_kept / max(1, self.deadlines_kept + self.deadlines_lost)

    @property
    def fit_use(self) -> float:
        """Share of the budget that fits use, at the median."""
        return percentile([p.real / p.told for p in self.fits], 50) if self.fits else math.nan

    @property
    def fits_late(self) -> float:
        return sum(p.real > p.told for p in self.fits) / max(1, len(self.fits))

    @property
    def partials_in_time(self) -> float:
        return sum(left >= 0 for left in self.partial_left) / max(1, len(self.partial_left))


def median_factor(pairs: Iterable[Pair]) -> float:
    """How far off at the median, either way; NaN of none."""
    factors = [pair.factor for pair in pairs]
    return percentile(factors, 50) if factors else math.nan


def median_ratio(pairs: Iterable[Pair]) -> float:
    """Told over real at the median; NaN of none."""
    ratios = [pair.told / max(1.0, pair.real) for pair in pairs]
    return percentile(ratios, 50) if ratios else math.nan


def mixed(offers: Iterable[Offer], seed: int) -> list[Offer]:
    """Offers with all kinds of wishes: some end cleanly, some want what nobody could do."""
    rng, made = random.Random(seed), []
    for offer in offers:
        drawn = rng.random()
        if drawn < 0.15:
            offer = replace(offer, on_deadline=OnDeadline.PARTIAL)
        elif drawn < 0.3:
            # Wants as much as there is time for.
            much = max(offer.max_tokens, round(3 * offer.deadline_ms / SPEED.token_ms))
            most = min(1024, much)
            offer = replace(offer, on_deadline=OnDeadline.FIT, max_tokens=most, length=most)
        elif drawn < 0.4 and not offer.is_open:
            service_ms = SPEED.service_ms(offer.prompt_tokens, offer.length)
            offer = replace(offer, deadline_ms=0.3 * service_ms + 20.0)
        made.append(offer)
    return made


def measure(
    offers: Iterable[Offer],
    fleet: Fleet,
    settings: Mapping[str, str],
    *,
    seed: int,
    warm_s: float = _WARM_S,
    cool_s: float = _COOL_S,
) -> Told:
    """Run ``offers``, and compare what came after ``warm_s`` and ``cool_s`` before the last one.

    The load goes on for a while after what is counted: what is told is of a load that goes on.
    """
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(
            _measure(loop, list(offers), fleet, settings, random.Random(seed), warm_s, cool_s)
        )
    finally:
        loop.close()


async def _measure(
    loop: VirtualLoop,
    offers: list[Offer],
    fleet: Fleet,
    settings: Mapping[str, str],
    rng: random.Random,
    warm_s: float,
    cool_s: float,
) -> Told:
    clock = VirtualClock(loop)
    fleet = replace(fleet, spec=replace(fleet.spec, way_back_s=WAY_BACK_S))
    parts, _ = new_orchestrator(fleet, clock, settings, rng)
    orchestrator = parts.orchestrator
    parts.lifecycle.start()
    told = Told()
    counts_until = offers[-1].at_s - cool_s
    running: set[asyncio.Task[None]] = set()

    def spawn(offer: Offer, again: DeadlineInfeasible | None = None) -> None:
        task = asyncio.ensure_future(client(offer, again))
        running.add(task)
        task.add_done_callback(running.discard)

    async def client(offer: Offer, again: DeadlineInfeasible | None) -> None:
        now = clock.now()
        counts = warm_s <= now < counts_until
        job, prompt = new_job(offer, now, offer.deadline_ms)
        unix_ms = round(1000 * clock.unix() + offer.deadline_ms)
        job = replace(job, deadline=replace(job.deadline, unix_ms=unix_ms))
        ear = _Ear()
        try:
            task = await orchestrator.submit(job, prompt, [ear])
        except DeadlineInfeasible as error:
            refused(offer, again, error, counts)
            return
        except QueueFull as error:
            while orchestrator.queue.full:  # noqa: ASYNC110 - the queue has no event for it
                await asyncio.sleep(_POLL_S)
            if counts:
                told.retries.append(Pair(error.retry_after_ms, 1000 * (clock.now() - now)))
            return
        except TidegateError:
            return
        start_ms = orchestrator.predicted_start_ms(task)
        await ear.is_over.wait()
        ending = task.ending
        assert ending is not None
        if task.marks.dispatched and counts:
            start = Pair(start_ms, 1000 * (task.marks.dispatched - now))
            if max(start) >= _SHORT_MS:
                told.starts.append(start)
        took_ms = 1000 * (clock.now() - now) + rng.uniform(0.0, CLIENT_MS)
        if isinstance(ending.error, DeadlineInfeasible):
            refused(offer, again, ending.error, counts)
            return
        if again is not None and counts and ending.outcome is not Outcome.FAILED:
            if ending.outcome is Outcome.MET:
                told.deadlines_kept += 1
                # With less than a worker's floor left nothing starts, however short (DL-3).
                floor_ms = 1000 * fleet.spec.min_start_s
                told.deadlines.append(Pair(offer.deadline_ms, max(floor_ms, took_ms)))
                finish_ms = again.details["predicted_finish_ms"]
                assert isinstance(finish_ms, float)
                told.finishes.append(Pair(finish_ms, took_ms))
            else:
                told.deadlines_lost += 1
        elif counts and offer.on_deadline is not OnDeadline.ERROR and task.completion_tokens:
            if ending.outcome is Outcome.PARTIAL:
                told.partial_left.append(offer.deadline_ms - took_ms)
            if task.fitted_tokens is not None:
                told.fits.append(Pair(offer.deadline_ms, took_ms))
                told.fits_cut += ending.outcome is Outcome.PARTIAL

    def refused(
        offer: Offer, again: DeadlineInfeasible | None, error: DeadlineInfeasible, counts: bool
    ) -> None:
        if again is not None:
            told.deadlines_lost += counts
            return
        at = error.details["earliest_feasible_deadline"]
        assert isinstance(at, int)
        left_ms = at - 1000 * clock.unix()
        spawn(replace(offer, deadline_ms=left_ms), error)

    for offer in offers:
        loop.call_at(offer.at_s, spawn, offer)
    await asyncio.sleep(offers[-1].at_s + _LINGER_S - clock.now())
    await parts.lifecycle.drain(0.0)
    await parts.lifecycle.close()
    for task in running:
        task.cancel()
    return told


class _Ear:
    """Hears a task's end."""

    def __init__(self) -> None:
        self.is_over = asyncio.Event()

    def started(self, task: Task) -> None:
        """The marks have it."""

    def tokens(self, task: Task, delta: Delta) -> None:
        """So has the count."""

    def ended(self, task: Task) -> None:
        self.is_over.set()


def _off(pairs: list[Pair]) -> str:
    """The middle of told over real, and how far single ones are off at the median."""
    return f"{median_ratio(pairs):.2f} (each x{median_factor(pairs):.2f} of {len(pairs)})"


FEW_LONG = Fleet(WorkerSpec(PACE, 2, kv_tokens=4096), count=1)
LONG = Scenario(
    SPEED,
    answers=Sizes(median=120, sigma=0.5, least=40, most=400),
    patience=(6.0, 12.0),
    open_share=1.0,
)
"""Long answers of unknown length, which hold all of few slots."""


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
            offers = some.offers(load * capacity, args.seconds, args.seed)
            many = mixed(offers, args.seed) if name == "mixed" else list(offers)
            for queue in ("-1", "8"):
                cells.append((f"{name} {load:g} x, queue {queue}", many, fleet, queue))
    for name, many, fleet, queue in cells:
        told = measure(many, fleet, {"QUEUE_SIZE": queue}, seed=args.seed)
        print(
            f"{name:28} starts {_off(told.starts)}, retry {_off(told.retries)},"
            f" deadlines kept {100 * told.kept:.1f} % at {median_ratio(told.deadlines):.2f}"
            f" ({len(told.deadlines)}), finish x{median_factor(told.finishes):.2f},"
            f" fit uses {100 * told.fit_use:.0f} %, late {100 * told.fits_late:.2f} %,"
            f" cut {told.fits_cut}/{len(told.fits)},"
            f" partial in time {100 * told.partials_in_time:.2f} % ({len(told.partial_left)})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
