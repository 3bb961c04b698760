"""Which instance is to give its model up for another one: a pure choice, like placement's.

Least harm first: one whose model has another instance or no work; then one whose running jobs can
end; one that others wait for only when nothing else is left. Among equals the model that was needed
longest ago goes, each waiting task counting as if it had been needed that much later.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum


class Harm(IntEnum):
    """What taking an instance's model would cost."""

    NONE = 0
    DRAIN = 1
    """Running jobs would be waited for, or moved."""
    WAITING = 2
    """Tasks wait for the model, and nobody else serves it."""


@dataclass(frozen=True, slots=True)
class Place:
    """An instance that could load the model. Times in seconds and ms."""

    address: str
    load_ms: float
    """Predicted, for the model in question."""
    is_spare: bool
    """Its own model is served elsewhere, too, or it has none."""
    running: int
    waiting: int
    """Tasks that wait for its model."""
    drain_ms: float
    """Until what runs there is over, probably."""
    resident_s: float
    """For how long it has had its model."""
    unneeded_s: float
    """How long ago its model was asked for; large where it never was."""

    @property
    def harm(self) -> Harm:
        if self.waiting and not self.is_spare:
            return Harm.WAITING
        return Harm.DRAIN if self.running else Harm.NONE

    @property
    def total_ms(self) -> float:
        return self.load_ms + self.drain_ms


@dataclass(frozen=True, slots=True)
class LoadChoice:
    """``place`` is None where it has to wait ``wait_s`` first, or (inf) for an instance."""

    place: Place | None
    wait_s: float = 0.0


def choose_place(places: Sequence[Place], min_residency_s: float) -> LoadChoice:
    """A model that others need stays for ``min_residency_s`` at least, so that two that take turns
    get some work done in between."""
    if not places:
        return LoadChoice(None, float("inf"))
    free = [p for p in places if p.harm is Harm.NONE or p.resident_s >= min_residency_s]
    if not free:
        return LoadChoice(None, min(min_residency_s - place.resident_s for place in places))
    return LoadChoice(
        min(free, key=lambda p: (p.harm, -p.unneeded_s / (1 + p.waiting), p.total_ms, p.address))
    )
