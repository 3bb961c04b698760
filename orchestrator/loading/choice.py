"""Chooses the instance that swaps its model for another one: a pure choice, like placement's.

Least cost first: an instance whose model has another instance or no work; then one whose running
jobs can end; one with waiting tasks only when nothing else is left. Among equals the model that was
needed longest ago goes, where each waiting task makes it seem needed more recently.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class SwapCost(IntEnum):
    """What taking an instance's model would cost."""

    NONE = 0
    DRAIN = 1
    """Running jobs would be waited for, or moved."""
    WAITING = 2
    """Tasks wait for the model, and no other instance serves it."""


@dataclass(frozen=True, slots=True)
class LoadPlace:
    """An instance that could load the model. Times are in seconds and ms."""

    address: str
    load_ms: float
    """Predicted ms to load the model in question."""
    is_spare: bool
    """Whether the instance's own model is served elsewhere too, or it has none."""
    running: int
    waiting: int
    """Number of tasks that wait for the instance's own model."""
    drain_ms: float
    """Predicted ms until the instance's running jobs are over."""
    resident_s: float
    """Seconds for which the instance has had its model."""
    unneeded_s: float
    """Seconds since the instance's model was last asked for; large if it never was."""
    is_others: bool = False
    """Whether other tenants have just used the instance's model, which no other instance serves."""

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
    """The instance to load a model. ``place`` is None if the load must first wait ``wait_s``
    seconds, or (inf) until an instance can take it."""

    place: LoadPlace | None
    wait_s: float = 0.0


def choose_place(
    places: Sequence[LoadPlace], min_residency_s: float, turn_in_s: float = 0.0
) -> LoadChoice:
    """Choose the instance that loads a model.

    A model that others need stays for at least ``min_residency_s``, so that two models that take
    turns get some work done in between; and until ``turn_in_s`` seconds from now, when those that
    ask may take a model from other tenants again, be it idle at this moment.
    """

    def wait_s(place: LoadPlace) -> float:
        young_s = min_residency_s - place.resident_s if place.cost is not SwapCost.NONE else 0.0
        return max(0.0, young_s, turn_in_s if place.is_others else 0.0)

    free = [place for place in places if not wait_s(place)]
    if not free:
        return LoadChoice(None, min(map(wait_s, places), default=float("inf")))
    return LoadChoice(
        min(free, key=lambda p: (p.cost, -p.unneeded_s / (1 + p.waiting), p.total_ms, p.address))
    )
