"""Clips that no instance has yet: their order, and what will become of them."""

from collections.abc import Iterator

from clips.dispatch.fleet import ClipFleet
from clips.dispatch.forecast import (
    NOMINAL_ABILITY,
    Ability,
    ClipNeeds,
    Expected,
    InstanceTimeline,
    forecast,
)
from clips.dispatch.task import ClipTask
from orchestrator.clock import Clock

FORECAST_TTL_S = 0.05
"""Least seconds between two forecasts of the waiting slots."""


class WaitingClips:
    """Waiting slots, the one with the least slack first. Behind them are slots of the refusal
    sample: they make nobody late."""

    def __init__(self, fleet: ClipFleet, clock: Clock) -> None:
        self._fleet = fleet
        self._clock = clock
        self._slots: list[ClipTask] = []
        self._expected: dict[ClipTask, Expected | None] = {}
        self._expected_at = -FORECAST_TTL_S

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, slot: ClipTask) -> bool:
        return slot in self._slots

    def __iter__(self) -> Iterator[ClipTask]:
        """A copy of the waiting slots in order, which later changes do not touch."""
        return iter(list(self._slots))

    def add(self, slot: ClipTask) -> None:
        """Add a slot that waits from now on."""
        self._slots.insert(self.place_of(slot), slot)
        self._expected_at = -FORECAST_TTL_S

    def remove(self, slot: ClipTask) -> None:
        """Remove a slot; fine for one that does not wait."""
        if slot in self._slots:
            self._slots.remove(slot)
        self._expected.pop(slot, None)
        self._expected_at = -FORECAST_TTL_S

    def place_of(self, slot: ClipTask) -> int:
        """How many slots would go before ``slot``."""
        return sum(1 for other in self._slots if _place(other) <= _place(slot))

    def start_by(self, needs: ClipNeeds) -> float:
        """Until when ``needs`` can start, by what instances tell now."""
        return max(needs.start_by(ability) for ability in self._abilities())

    def position(self, slot: ClipTask) -> int:
        """Place of ``slot`` in line, 1 for the next one; 0 if it does not wait."""
        return self._slots.index(slot) + 1 if slot in self._slots else 0

    def reorder(self) -> None:
        """Sort again by the times that instances tell now."""
        for slot in self._slots:
            self.time(slot)
        self._slots.sort(key=_place)

    def time(self, slot: ClipTask) -> None:
        """Set until when ``slot`` can start, by what instances tell now."""
        slot.start_by = self.start_by(slot.needs)
        slot.drop_at = max(slot.needs.start_by(ability.at_best) for ability in self._abilities())

    def lines(self, now: float) -> dict[str, InstanceTimeline]:
        """The lines of instances that take slots, as they will become free."""
        return {one.address: one.line(now) for one in self._fleet.ready()}

    def expected(self, slot: ClipTask) -> Expected | None:
        """What will become of a waiting slot; None if nothing can be said."""
        now = self._clock.now()
        if now - self._expected_at >= FORECAST_TTL_S:
            found = forecast((each.needs for each in self._slots), self.lines(now))
            self._expected = dict(zip(self._slots, found, strict=True))
            self._expected_at = now
        return self._expected.get(slot)

    def _abilities(self) -> list[Ability]:
        return [one.ability for one in self._fleet.seen()] or [NOMINAL_ABILITY]


def _place(slot: ClipTask) -> tuple[bool, float]:
    return slot.refusal_sample, slot.start_by
