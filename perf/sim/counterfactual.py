"""Share of refusals that were wrong: the same arrivals again, with one refused request kept
(DL-17).

Unserved by our own decision are those refused when they came, because time or room was short, those
taken out of the queue, and those that a worker stopped before their deadline. In its own run such a
request is kept: nothing but its deadline stops it. Everybody else is treated as ever.
"""

import math
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from perf.sim.arrivals import SimArrival
from perf.sim.simulate import Fleet, SimResult, simulate
from protocol import Code, Outcome

_LINGER_S = 5.0
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
