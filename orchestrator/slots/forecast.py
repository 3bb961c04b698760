"""When slots would be done, and what of them: the worker's own rules, played ahead. Pure.

An instance is a few leases of buffers and four stages, each of which serves one slot at a time, so
that one slot's speech overlaps another's video::

    lease ─▶ speech ∥ portrait ─▶ video ─▶ check ─▶ lease

A slot must be out of its last stage ``buffer_s`` before its deadline (SL-2).
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from worker.media.budgets import BUDGETS, Stage
from worker.media.plan import ClipPlan, asked_for, ladder
from worker.media.recipe import Recipe
from worker.protocol.slot import SlotState

NOMINAL: Final = ClipPlan(seconds=45.0, fps=24, size=512, has_check=True)
"""What SL-1's budgets are for; the worker's own is beside its models, in ``media.pipeline``."""
NOMINAL_SLOTS: Final = 2
NOMINAL_BUFFER_S: Final = 5.0


def units_of(plan: ClipPlan) -> dict[Stage, float]:
    """What a plan asks of each stage."""
    return {
        Stage.SPEECH: plan.seconds,
        Stage.PORTRAIT: plan.image_units,
        Stage.VIDEO: plan.video_units,
        Stage.CHECK: 1.0 if plan.has_check else 0.0,
    }


@dataclass(frozen=True, slots=True)
class Ability:
    """What an instance can do, and how fast. ``rates``: seconds per unit of each stage's work."""

    rates: Mapping[Stage, float]
    max_size: int = NOMINAL.size
    max_seconds: float = NOMINAL.seconds
    buffer_s: float = NOMINAL_BUFFER_S
    slots: int = NOMINAL_SLOTS

    @classmethod
    def of(cls, state: SlotState) -> "Ability":
        """What a worker says of itself."""
        rates = dict(NOMINAL_ABILITY.rates)
        for stage in Stage:
            told = state.stages.get(stage.value)
            if told is not None:
                rates[stage] = told.seconds_per_unit
        return cls(
            rates, state.max_size, state.max_seconds, state.buffer_s, max(1, state.slots_total)
        )

    def takes_s(self, plan: ClipPlan) -> float:
        """With nothing else there."""
        times = {stage: self.rates[stage] * units for stage, units in units_of(plan).items()}
        first_s = max(times[Stage.SPEECH], times[Stage.PORTRAIT])
        return first_s + times[Stage.VIDEO] + times[Stage.CHECK]

    def longest_stage(self, plan: ClipPlan) -> Stage:
        """The stage that takes most of ``plan``'s time."""
        units = units_of(plan)
        return max(Stage, key=lambda stage: self.rates[stage] * units[stage])


def _nominal() -> Ability:
    units = units_of(NOMINAL)
    return Ability({stage: BUDGETS[stage].target_s / units[stage] for stage in Stage})


NOMINAL_ABILITY: Final = _nominal()
"""Of an instance that does not say."""


class Wish:
    """What one slot asks for, and by when."""

    def __init__(self, recipe: Recipe, deadline_at: float, *, degrade: bool) -> None:
        self.deadline_at = deadline_at
        self._recipe = recipe
        self._degrade = degrade
        self._plans: dict[tuple[int, float], tuple[ClipPlan, ...]] = {}

    def plans(self, ability: Ability) -> tuple[ClipPlan, ...]:
        """What would do, the best first."""
        key = (ability.max_size, ability.max_seconds)
        found = self._plans.get(key)
        if found is None:
            full = asked_for(self._recipe, *key)
            found = self._plans[key] = tuple(ladder(full)) if self._degrade else (full,)
        return found

    def due_at(self, ability: Ability) -> float:
        """When its last stage must be over."""
        return self.deadline_at - ability.buffer_s

    def start_by(self, ability: Ability) -> float:
        """Later, and nothing that would do can be in time."""
        least_s = min(ability.takes_s(plan) for plan in self.plans(ability))
        return self.due_at(ability) - least_s


@dataclass(slots=True)
class Begun:
    """A slot that an instance has: its plan, and the percent done of each stage."""

    plan: ClipPlan
    percents: Mapping[str, int] = field(default_factory=dict)

    def units_left(self) -> dict[Stage, float]:
        """What is still to be done of each stage."""
        return {
            stage: units * (1 - min(100, self.percents.get(stage, 0)) / 100)
            for stage, units in units_of(self.plan).items()
        }


class Line:
    """One instance's leases and stages as they will become free."""

    def __init__(
        self, ability: Ability, now: float, begun: Iterable[Begun], others_s: Sequence[float] = ()
    ) -> None:
        """``others_s``: when leases that are not ours will be free, from ``now`` on."""
        self.ability = ability
        self._leases = [now + max(0.0, s) for s in sorted(others_s)[-ability.slots :]]
        self._leases += [now] * (ability.slots - len(self._leases))
        heapq.heapify(self._leases)
        self._stages = dict.fromkeys(Stage, now)
        for one in begun:
            self._run(one.units_left(), keep=True)

    @property
    def free_at(self) -> float:
        """When the next slot can begin."""
        return self._leases[0]

    def finish(self, plan: ClipPlan) -> float:
        """When ``plan`` would be done, were it next."""
        return self._run(units_of(plan), keep=False)

    def finish_of(self, begun: Begun) -> float:
        """When one that was sent would be done, were it next."""
        return self._run(begun.units_left(), keep=False)

    def take(self, plan: ClipPlan) -> None:
        """``plan`` is next."""
        self._run(units_of(plan), keep=True)

    def _run(self, units: Mapping[Stage, float], *, keep: bool) -> float:
        rates, free = self.ability.rates, self._stages
        start = self._leases[0]
        ends: dict[Stage, float] = {}
        for stage in Stage:
            ready_at = start
            if stage is Stage.VIDEO:
                ready_at = max(ends[Stage.SPEECH], ends[Stage.PORTRAIT])
            elif stage is Stage.CHECK:
                ready_at = ends[Stage.VIDEO]
            work_s = rates[stage] * units[stage]
            ends[stage] = max(ready_at, free[stage]) + work_s if work_s else ready_at
        if keep:
            for stage, end in ends.items():
                if units[stage]:
                    free[stage] = end
            heapq.heapreplace(self._leases, ends[Stage.CHECK])
        return ends[Stage.CHECK]


class Expected(NamedTuple):
    """What will become of a slot, as far as can be said. Times are on the clock."""

    address: str
    plan: ClipPlan
    finish_at: float
    is_in_time: bool


def best_plan(wish: Wish, line: Line) -> tuple[ClipPlan, float, bool]:
    """The best of ``wish`` that ``line`` would finish in time, and when; else the least of it."""
    due_at = wish.due_at(line.ability)
    for plan in wish.plans(line.ability):
        finish_at = line.finish(plan)
        if finish_at <= due_at:
            return plan, finish_at, True
    return plan, finish_at, False


def place(wish: Wish, lines: Mapping[str, Line]) -> Expected:
    """The earliest finish of those in time, of all where none is."""
    found = [Expected(address, *best_plan(wish, line)) for address, line in lines.items()]
    return min(found, key=lambda each: (not each.is_in_time, each.finish_at))


def forecast(wishes: Iterable[Wish], lines: Mapping[str, Line]) -> list[Expected]:
    """Of those that wait, in their order. What will not be in time takes nobody's place. The lines
    are as they will be then."""
    expected = []
    for wish in wishes:
        found = place(wish, lines)
        if found.is_in_time:
            lines[found.address].take(found.plan)
        expected.append(found)
    return expected
