"""Share of wrong refusals: replays the same arrivals, but admits one refused request per run
(DL-17).

Our policy leaves three kinds of requests unserved: refused on arrival because time or room was
short, removed from the queue, or stopped by a worker before the deadline. Each gets its own run, in
which only its deadline can stop it. All other requests are treated as usual.
"""

import argparse
import math
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from perf.report.bundle import Figure
from perf.sim.arrivals import Scenario, SimArrival
from perf.sim.scenes import FLEET, SPEED, UNBOUNDED, capacity_per_s
from perf.sim.simulate import Fleet, SimResult, simulate
from perf.sim.study import Case
from protocol import Code, Outcome

_LINGER_S = 5.0
_SCENARIO = Scenario(SPEED, open_share=1.0)
_OURS = (Code.DEADLINE_INFEASIBLE, Code.QUEUE_FULL)


@dataclass(frozen=True, slots=True)
class FalseRefusals:
    """Numbers of requests that ended ``unserved``, of those of them ``tried`` again, of these
    met."""

    offered: int
    unserved: int
    tried: int
    met: int

    @property
    def share(self) -> float:
        """Share of the unserved requests tried again that would have been met."""
        return self.met / self.tried if self.tried else 0.0


def is_unserved(result: SimResult) -> bool:
    """Whether it was our decision that ended this request."""
    if result.outcome is Outcome.REFUSED:
        return result.code in _OURS
    before = result.ended_s < result.arrival.at_s + result.arrival.deadline_ms / 1000 - 1e-3
    return result.outcome is Outcome.MISSED and before and not result.part_missed


def false_refusals(
    arrivals: Iterable[SimArrival],
    fleet: Fleet,
    settings: Mapping[str, str],
    seed: int,
    sample: int,
) -> FalseRefusals:
    """Simulate again with each of ``sample`` unserved requests kept, drawn at random."""
    arrivals = list(arrivals)
    results = simulate(arrivals, fleet, settings, seed=seed, kept=-1).results
    unserved = [at for at, result in enumerate(results) if is_unserved(result)]
    tried = random.Random(seed).sample(unserved, min(sample, len(unserved)))
    met = 0
    for at in tried:
        met += _met_if_kept(arrivals, at, fleet, settings, seed)
    return FalseRefusals(len(results), len(unserved), len(tried), met)


def _met_if_kept(
    arrivals: list[SimArrival], at: int, fleet: Fleet, settings: Mapping[str, str], seed: int
) -> bool:
    """Whether the kept request is met. Arrivals after its deadline make no difference, and are left
    out."""
    over_s = arrivals[at].at_s + arrivals[at].deadline_ms / 1000
    earlier = [arrival for arrival in arrivals if arrival.at_s <= over_s]
    last_s = arrivals[-1].at_s if over_s == math.inf else over_s
    linger_s = _LINGER_S + last_s - earlier[-1].at_s
    run = simulate(earlier, fleet, settings, seed=seed, kept=at, linger_s=linger_s)
    return run.results[at].met


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sample", type=int, default=10, help="refused ones kept, each a run")
    parser.set_defaults(loads=[1.5, 2.0])


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """A case for each load."""
    for load in args.loads:

        def figures(load: float = load) -> list[Figure]:
            per_s, shares, unserved = load * capacity_per_s(_SCENARIO, FLEET, 1), [], []
            for seed in range(1, args.seeds + 1):
                arrivals = _SCENARIO.arrivals(per_s, args.seconds or 10.0, seed)
                found = false_refusals(arrivals, FLEET, UNBOUNDED, seed, args.sample)
                shares.append(found.share)
                unserved.append(found.unserved / max(1, found.offered))
            above, of = f"refusals.{load:g}x", Figure.of
            return [
                of(f"{above}.wrong", "of the unserved tried again, met", "", shares),
                of(f"{above}.unserved", "unserved by our decision", "", unserved),
            ]

        yield Case(f"refusals-{load:g}x", f"refusals at {load:g} times the capacity", figures)
