"""Chooses the instance that swaps its model for another: a pure choice, as in placement.

Least cost first: an instance whose model has another instance or no work; then one whose running
jobs can end; one with waiting tasks only as a last resort. Among equals the model that was needed
least recently is replaced; each waiting task makes a model count as needed more recently.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class SwapCost(IntEnum):
    """The cost of replacing an instance's model."""

    NONE = 0
    DRAIN = 1
    """Running jobs must end first or move."""
    WAITING = 2
    """Tasks wait for the model, and no other instance serves it."""


@dataclass(frozen=True, slots=True)
class LoadPlace:
    """An instance that could load the model. Times are in seconds and ms."""

    address: str
    load_ms: float
    """Predicted ms to load the model in question."""
    is_spare: bool
    """Whether another instance serves the instance's model too, or it has none."""
    running: int
    waiting: int
    """Number of tasks that wait for the instance's present model."""
    drain_ms: float
    """Predicted ms until the instance's running jobs end."""
    resident_s: float
    """Seconds for which the instance has served its model."""
    unneeded_s: float
    """Seconds since the last request for the instance's model; large if there was none."""
    is_others: bool = False
    """Whether other tenants recently used the instance's model and no other instance serves it."""

    @property
    def cost(self) -> SwapCost:
        if self.waiting and not self.is_spare:
            return SwapCost.WAITING
        return SwapCost.DRAIN if self.running else SwapCost.NONE

    @property
    def total_ms(self) -> float:
        return self.load_ms + self.drain_ms


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """The instance that loads a model. ``place`` is None if the load must wait: ``wait_s`` seconds,
    or (inf) until an instance can load it."""

    place: LoadPlace | None
    wait_s: float = 0.0


def choose_place(
    places: Sequence[LoadPlace], min_residency_s: float, turn_in_s: float = 0.0
) -> LoadChoice:
    """Choose the instance that loads a model. A model that others need stays for at least
    ``min_residency_s``, so that two alternating models get work done in between. A model of other
    tenants also stays for ``turn_in_s`` seconds from now, even if it is idle: then the requesting
    tenants may replace one again."""

    def wait_s(place: LoadPlace) -> float:
        young_s = min_residency_s - place.resident_s if place.cost is not SwapCost.NONE else 0.0
        return max(0.0, young_s, turn_in_s if place.is_others else 0.0)

    free = [place for place in places if not wait_s(place)]
    if not free:
        return LoadChoice(None, min(map(wait_s, places), default=float("inf")))
    return LoadChoice(
        min(free, key=lambda p: (p.cost, -p.unneeded_s / (1 + p.waiting), p.total_ms, p.address))
    )
