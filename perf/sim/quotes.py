"""Accuracy of quotes: compares quoted chances with outcomes (DL-21).

The load is half facts, half stories of unstated length (``perf.load.cells``), with bursts, on one
instance with 64 slots, from half to twice its capacity. Every client asks for a quote. Then

- six in ten send the request with their own deadline. Of those with a quote of 80 %, were 80 % in
  time?
- three in ten reserve the earliest deadline with 50, 90 or 99 %, and send the request with it;
- one in ten ignores the quote, and uses the same percentile of the latest hundred answers' times
  as its deadline.
"""

import argparse
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from orchestrator.prediction.promises import BROKEN
from orchestrator.service import Orchestrator
from orchestrator.tasks.deadline import Deadline
from perf.load.cells import mixes
from perf.report.bundle import Figure
from perf.report.stats import percentile
from perf.sim.arrivals import SimArrival
from perf.sim.replay.loop import VirtualClock
from perf.sim.scenes import CAPACITY_PER_S, ENGINES, UNBOUNDED, Drawn
from perf.sim.simulate import Driver, SimResult, new_job, simulate
from perf.sim.study import Case

DEADLINES_MS: Final = (300.0, 500.0, 800.0, 1200.0, 2000.0, 3000.0, 5000.0)
BINS: Final = ((0.0, 0.1), (0.1, 0.3), (0.3, 0.5), (0.5, 0.7), (0.7, 0.9), (0.9, 1.01))
WARM_S: Final = 20.0
"""Seconds at the beginning whose requests do not count: nothing is learnt by then."""
_RESERVE_SHARE, _GUESS_SHARE = 0.3, 0.1
_HOLD_S: Final = 1.0
_LATEST: Final = 100


class QuotedRequest(NamedTuple):
    """What a client was told, and the outcome of its request."""

    how: str
    """``quoted`` for a chance by the client's own deadline, ``reserved``, or ``guessed`` from
    percentiles."""
    chance: float
    within_ms: float
    result: SimResult


class QuotingDriver(Driver):
    """Submits arrivals as clients that ask for quotes do."""

    def __init__(
        self, orchestrator: Orchestrator, clock: VirtualClock, states_deadline: bool
    ) -> None:
        super().__init__(orchestrator, clock, states_deadline)
        self.told: list[QuotedRequest] = []
        self._promises = orchestrator.stages.prediction.promises
        self._rng = random.Random(7)
        self._open: list[SimResult] = []
        self._took_ms: deque[float] = deque([1000.0], maxlen=_LATEST)
        """Times of the latest answers that were in time."""

    async def submit(self, arrival: SimArrival, result: SimResult, name: str) -> None:
        drawn, level = self._rng.random(), self._rng.choice(tuple(BROKEN))
        job, prompt = new_job(arrival, self.clock.now(), arrival.deadline_ms)
        unix_ms = 0
        if drawn < _GUESS_SHARE:
            told = QuotedRequest("guessed", level, self._percentile_ms(100 * level), result)
        else:
            task, quote = await self.orchestrator.questions.quote(job, prompt, 0)
            if drawn < _GUESS_SHARE + _RESERVE_SHARE:
                offer = next(one for one in quote.earliest if one.chance == level)
                unix_ms = self._promises.reserve(task, offer.within_ms, level, _HOLD_S).unix_ms
                told = QuotedRequest("reserved", level, unix_ms - 1000 * self.clock.unix(), result)
            else:
                assert quote.stated is not None
                told = QuotedRequest("quoted", quote.stated.chance, arrival.deadline_ms, result)
        self.told.append(told)
        self._open.append(result)
        result.arrival = replace(arrival, deadline_ms=told.within_ms)
        deadline = Deadline(self.clock.now() + told.within_ms / 1000, unix_ms)
        await self.ask(replace(job, deadline=deadline, correlation_id=name), prompt, result)

    def _percentile_ms(self, q: float) -> float:
        for one in self._open:
            if one.met:
                self._took_ms.append(1000 * (one.ended_s - one.arrival.at_s))
        self._open = [one for one in self._open if not one.endings]
        return percentile(list(self._took_ms), q)


def told_under(load: float, seconds: float, seed: int) -> list[QuotedRequest]:
    """What clients were told at ``load`` times the capacity, after the first seconds."""
    mix = next(one for one in mixes(load * CAPACITY_PER_S) if one.name == "capacity")
    streams = tuple(replace(each, deadlines_ms=DEADLINES_MS) for each in mix.streams)
    drivers: list[QuotingDriver] = []

    def new_driver(*given: Any) -> QuotingDriver:
        drivers.append(QuotingDriver(*given))
        return drivers[-1]

    simulate(
        Drawn(replace(mix, streams=streams)).arrivals(WARM_S + seconds, seed),
        ENGINES["64"].fleet,
        UNBOUNDED,
        seed=seed,
        linger_s=10.0,
        new_driver=new_driver,
    )
    return [one for one in drivers[0].told if one.result.arrival.at_s > WARM_S]


def figures_of(load: float, runs: Sequence[Sequence[QuotedRequest]]) -> list[Figure]:
    """Figures of one load, over the seeds."""

    def figure(key: str, label: str, samples: list[float], unit: str = "") -> Figure:
        return Figure.of(f"{load:g}x.{key}", label, unit, samples, better="neither")

    found = [
        figure("error", "mean distance of stated from true chance", [_error(run) for run in runs])
    ]
    for low, high in BINS:
        met = [_met_share(_in_bin(run, low, high)) for run in runs if _in_bin(run, low, high)]
        if met:
            label = f"met of those quoted {100 * low:.0f} to {min(100 * high, 100):.0f} %"
            found.append(figure(f"quoted.{100 * low:.0f}", label, met))
    for how in ("reserved", "guessed"):
        for level in BROKEN:
            name, of = f"{how}.{100 * level:g}", [_of(run, how, level) for run in runs]
            found.append(
                figure(name, f"met of those {how} with {100 * level:g} %", [*map(_met_share, of)])
            )
            within = [percentile([one.within_ms for one in each], 50) for each in of]
            label = f"time until the deadline, {how} with {100 * level:g} %"
            found.append(figure(f"{name}.within_ms", label, within, "ms"))
    return found


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(loads=[0.5, 1.0, 1.5, 2.0])


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """A case for each load."""
    for load in args.loads:

        def figures(load: float = load) -> list[Figure]:
            seeds = range(1, args.seeds + 1)
            return figures_of(load, [told_under(load, args.seconds or 120.0, n) for n in seeds])

        yield Case(f"quotes-{load:g}x", f"quotes at {load:g} times the capacity", figures)


def _of(run: Sequence[QuotedRequest], how: str, level: float) -> list[QuotedRequest]:
    return [one for one in run if one.how == how and one.chance == level]


def _in_bin(run: Sequence[QuotedRequest], low: float, high: float) -> list[QuotedRequest]:
    return [one for one in run if one.how == "quoted" and low <= one.chance < high]


def _met_share(told: Sequence[QuotedRequest]) -> float:
    return sum(one.result.met for one in told) / max(1, len(told))


def _error(run: Sequence[QuotedRequest]) -> float:
    """Mean distance of the share that was met from the mean chance, over the bins, by the number of
    requests in each (expected calibration error)."""
    quoted = [one for one in run if one.how == "quoted"]
    off = 0.0
    for low, high in BINS:
        told = _in_bin(run, low, high)
        if told:
            mean = sum(one.chance for one in told) / len(told)
            off += len(told) * abs(_met_share(told) - mean)
    return off / max(1, len(quoted))
