"""Clips that wait for an instance: their order and their forecasts.

Tasks have a different queue (``orchestrator.queue``). Clips have no classes, no turns of tenants
and no pauses, and the slack of all waiting clips changes with each report of an instance.
"""

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
"""Minimum seconds between two forecasts of the waiting clips."""


class WaitingClips:
    """Waiting clips, least slack first. Clips of the refusal sample wait behind all others, and do
    not delay them."""

    def __init__(self, fleet: ClipFleet, clock: Clock) -> None:
        self._fleet = fleet
        self._clock = clock
        self._clips: list[ClipTask] = []
        self._expected: dict[ClipTask, Expected | None] = {}
        self._expected_at = -FORECAST_TTL_S

    def __len__(self) -> int:
        return len(self._clips)

    def __iter__(self) -> Iterator[ClipTask]:
        """A copy of the waiting clips in order; later changes do not affect it."""
        return iter(list(self._clips))

    def add(self, clip: ClipTask) -> None:
        self._clips.insert(self.place_of(clip), clip)
        self._expected_at = -FORECAST_TTL_S

    def remove(self, clip: ClipTask) -> None:
        """Remove a clip; no error if it does not wait."""
        if clip in self._clips:
            self._clips.remove(clip)
        self._expected.pop(clip, None)
        self._expected_at = -FORECAST_TTL_S

    def place_of(self, clip: ClipTask) -> int:
        """Number of clips ahead of ``clip``."""
        return sum(1 for other in self._clips if _place(other) <= _place(clip))

    def start_by(self, needs: ClipNeeds) -> float:
        """Latest start of ``needs``, from the instances' current reports."""
        return max(needs.start_by(ability) for ability in self._abilities())

    def position(self, clip: ClipTask) -> int:
        """Place of ``clip`` in line, 1 for the next one; 0 if it does not wait."""
        return self._clips.index(clip) + 1 if clip in self._clips else 0

    def reorder(self) -> None:
        """Sort again with the instances' current times."""
        for clip in self._clips:
            self.time(clip)
        self._clips.sort(key=_place)

    def time(self, clip: ClipTask) -> None:
        """Set the latest start of ``clip``, from the instances' current reports."""
        clip.start_by = self.start_by(clip.needs)
        clip.drop_at = max(clip.needs.start_by(ability.at_best) for ability in self._abilities())

    def lines(self, now: float) -> dict[str, InstanceTimeline]:
        """Timelines of the instances that accept clips."""
        return {one.address: one.line(now) for one in self._fleet.ready()}

    def expected(self, clip: ClipTask) -> Expected | None:
        """Forecast for a waiting clip; None if there is none."""
        now = self._clock.now()
        if now - self._expected_at >= FORECAST_TTL_S:
            found = forecast((each.needs for each in self._clips), self.lines(now))
            self._expected = dict(zip(self._clips, found, strict=True))
            self._expected_at = now
        return self._expected.get(clip)

    def _abilities(self) -> list[Ability]:
        return [one.ability for one in self._fleet.seen()] or [NOMINAL_ABILITY]


def _place(clip: ClipTask) -> tuple[bool, float]:
    return clip.refusal_sample, clip.start_by
