"""Ways to share many instances among many orchestrators."""

from dataclasses import dataclass

from orchestrator.state.shares import INSTANCES_EACH

ROUND_TRIP_S = 0.002
"""Seconds of a round trip to the store, on a network that is not far away."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """One way. As it stands it is that of orchestrators each of which is in front of all instances,
    has a queue of its own, and counts on each slot that looks free."""

    name: str
    label: str
    has_shares: bool = False
    """Whether each has a share of each instance's slots, agreed four times a second
    (``state.shares``)."""
    subset: int = 0
    """Number of instances that each is in front of, about (``state.shares.front_of``); 0 for all of
    them."""
    choices: int = 0
    """Number of instances with room, drawn at random, among which the choice is; 0 for all."""
    has_shared_queue: bool = False
    """Whether all have one queue, in the store, from which each takes what it has room for."""
    is_omniscient: bool = False
    """Whether there is one orchestrator for all requests, which knows every instance at every
    moment."""

    @property
    def delay_s(self) -> float:
        """Seconds from the choice of an instance until the request is there."""
        return ROUND_TRIP_S if self.has_shared_queue else 0.0


OURS = f"subset-{INSTANCES_EACH}"
"""The way that is the service's own."""
SHARINGS = {
    sharing.name: sharing
    for sharing in (
        Sharing("free", "all instances, whatever looks free"),
        Sharing("two", "all instances, the better of two at random", choices=2),
        Sharing("shares", "all instances, shares of their slots", has_shares=True),
        *(
            Sharing(
                f"subset-{subset}",
                f"{subset} instances each, shares of their slots",
                has_shares=True,
                subset=subset,
            )
            for subset in (100, INSTANCES_EACH, 20)
        ),
        Sharing(
            "shared-queue",
            f"{INSTANCES_EACH} instances each, shares of their slots, one queue in the store",
            has_shares=True,
            subset=INSTANCES_EACH,
            has_shared_queue=True,
        ),
        Sharing(
            "omniscient-40",
            "one scheduler that knows all, the best of 40 at random",
            choices=40,
            is_omniscient=True,
        ),
        Sharing("omniscient", "one scheduler that knows all", is_omniscient=True),
    )
}
