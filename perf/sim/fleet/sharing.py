"""Ways to share many instances among many orchestrators."""

import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from orchestrator.state.shares import shares_of

RENEW_S = 0.25
ROUND_TRIP_S = 0.002
"""Seconds of a round trip to the store, on a network that is not far away."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """One way. As it stands it is that of an orchestrator which is in front of all instances, and
    counts on each slot that looks free."""

    name: str
    label: str
    has_shares: bool = False
    """Whether each has a share of each instance's slots, agreed four times a second."""
    is_exclusive: bool = False
    """Whether shares add up to the slots even where there are more orchestrators than slots."""
    is_wanting: bool = False
    """Whether only those that want a slot get one whatever the others have."""
    subset: int = 0
    """Number of instances that each is bound to, about (``state.shares.front_of``); 0 for all of
    them."""
    sample: int = 0
    """Number of instances with room, drawn at random, among which the choice is; 0 for all."""
    is_one_queue: bool = False
    """Whether all requests are in one queue that knows every instance at every moment."""
    delay_s: float = 0.0
    """Seconds from the choice of an instance until the request is there."""

    def store_commands(self, members: int, per_s: float) -> float:
        """Commands to the store per second, without those of durable tasks and limits: renewals of
        leases, which tell demands, and what reads the drains; of a queue in the store also each
        request's way in and out, and its end."""
        renewals = 2 * members / RENEW_S
        return renewals + (3 * per_s if self.delay_s else 0.0)


SHARINGS = {
    sharing.name: sharing
    for sharing in (
        Sharing("free", "no shares: whatever looks free"),
        Sharing("shares", "shares of slots, never less than one", has_shares=True),
        Sharing("exclusive", "shares of slots, each slot once", has_shares=True, is_exclusive=True),
        Sharing(
            "wanting", "shares of slots, one for whoever wants it", has_shares=True, is_wanting=True
        ),
        Sharing("shares-eight", "shares, the best of eight", has_shares=True, sample=8),
        Sharing(
            "wanting-eight",
            "one for whoever wants it, the best of eight",
            has_shares=True,
            is_wanting=True,
            sample=8,
        ),
        Sharing("two", "the better of two at random", sample=2),
        Sharing("eight", "the best of eight at random", sample=8),
        Sharing("subset-16", "16 instances each", subset=16, has_shares=True),
        Sharing("subset-40", "40 instances each", subset=40, has_shares=True),
        Sharing("subset-40-free", "40 instances each, no shares", subset=40),
        Sharing(
            "store-queue", "one queue in the store", is_one_queue=True, delay_s=ROUND_TRIP_S
        ),
        Sharing("omniscient", "one scheduler that knows all", is_one_queue=True),
    )
}


def preference(address: str, tags: Sequence[str]) -> list[str]:
    """Members in the order in which an instance gives its slots, another one for each instance
    (rendezvous hashing)."""
    return sorted(tags, key=lambda tag: (zlib.crc32(f"{address} {tag}".encode()), tag))


def exclusive_shares(slots: int, demands: Mapping[str, int]) -> dict[str, int]:
    """Divide ``slots`` as ``shares_of`` does, but that they add up whoever gets none; of equal
    demands the first in ``demands`` come first."""
    left, given = slots, dict.fromkeys(demands, 0)
    wanting = sorted((tag for tag, count in demands.items() if count > 0), key=demands.__getitem__)
    while left > 0 and wanting:
        part = max(1, left // len(wanting))
        for tag in wanting:
            more = min(part, demands[tag] - given[tag], left)
            given[tag] += more
            left -= more
        wanting = [tag for tag in wanting if given[tag] < demands[tag]]
    for at, tag in enumerate(given):
        given[tag] += left // len(given) + (at < left % len(given))
    return given


def divided(sharing: Sharing, slots: int, demands: Mapping[str, int]) -> dict[str, int]:
    """Each member's share of an instance's slots; ``demands`` are in the instance's own order."""
    if not (sharing.is_exclusive or sharing.is_wanting):
        return shares_of(slots, demands)
    shares = exclusive_shares(slots, demands)
    if sharing.is_wanting:
        shares |= {tag: max(1, shares[tag]) for tag, wanted in demands.items() if wanted}
    return shares
