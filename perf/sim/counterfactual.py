"""Which refusals were wrong: the same arrivals once more, with that one request kept (DL-17).

Unserved by our own decision are those refused when they came, for want of time or of room, those
taken out of the queue, and those that a worker stopped before their deadline. In its own run such a
request is kept: nothing but its deadline stops it. Everybody else is treated as ever.
"""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from perf.sim.offers import Offer
from perf.sim.run import Fate, Fleet, simulate
from worker.protocol import Code, Outcome

_OURS = (Code.DEADLINE_INFEASIBLE, Code.QUEUE_FULL)


@dataclass(frozen=True, slots=True)
class FalseRefusals:
    """How many requests ended ``unserved``, how many of them were tried, how many of these met."""

    offered: int
    unserved: int
    tried: int
    met: int

    @property
    def share(self) -> float:
        """Of the unserved, those that would have been met."""
        return self.met / self.tried if self.tried else 0.0


def is_unserved(fate: Fate) -> bool:
    """Whether it was our decision that ended this."""
    if fate.outcome is Outcome.REFUSED:
        return fate.code in _OURS
    before = fate.ended_s < fate.offer.at_s + fate.offer.deadline_ms / 1000 - 1e-3
    return fate.outcome is Outcome.MISSED and before and not fate.part_missed


def false_refusals(
    offers: Iterable[Offer], fleet: Fleet, settings: Mapping[str, str], seed: int, sample: int
) -> FalseRefusals:
    """Try ``sample`` of the unserved again, drawn at random."""
    offers = list(offers)
    fates = simulate(offers, fleet, settings, seed=seed, kept=-1).fates
    unserved = [at for at, fate in enumerate(fates) if is_unserved(fate)]
    tried = random.Random(seed).sample(unserved, min(sample, len(unserved)))
    met = 0
    for at in tried:
        again = simulate(offers, fleet, settings, seed=seed, kept=at).fates[at]
        met += again.met
    return FalseRefusals(len(fates), len(unserved), len(tried), met)
