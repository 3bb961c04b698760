"""Predicts when clips finish, and which parts are rendered, with the worker's own rules. Pure.

The model of an instance has a few buffer leases and four stages. Each stage serves one clip at a
time, so that one clip's speech overlaps another's video::

    lease ─▶ speech ∥ portrait ─▶ video ─▶ check ─▶ lease

A clip must leave its last stage ``buffer_s`` before its deadline (SL-2).
"""

import copy
import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple

from clips.plan.budgets import BUDGETS, ClipStage
from clips.plan.plan import BUFFER_S, NOMINAL, ClipPlan, asked_for, fit, least
from clips.plan.recipe import Recipe
from clips.state import ClipsState

NOMINAL_SLOTS: Final = 2
_MAX_ABILITIES: Final = 64

Work = Mapping[ClipStage, float]
"""Seconds of work that each stage has for one clip."""


def alone_s(work: Work) -> float:
    """Seconds that ``work`` takes on an otherwise idle instance."""
    speech, portrait, video, check = (work[stage] for stage in ClipStage)
    return max(speech, portrait) + video + check


@dataclass(frozen=True, slots=True, eq=False)
class Ability:
    """An instance's limits and speed. A change makes a new object."""

    rates: Mapping[ClipStage, float]
    """Seconds per unit of each stage's work."""
    max_size: int = NOMINAL.size
    max_seconds: float = NOMINAL.seconds
    buffer_s: float = BUFFER_S
    slots: int = NOMINAL_SLOTS
    fastest: "Ability | None" = None
    """The ability with the minimum times of the stages, 0 if nothing was rendered recently; None if
    unknown."""

    @classmethod
    def of(cls, state: ClipsState) -> "Ability":
        rates = dict(NOMINAL_ABILITY.rates)
        least = dict(rates)
        for stage in ClipStage:
            told = state.stages.get(stage.value)
            if told is not None:
                rates[stage] = told.seconds_per_unit
                least[stage] = told.seconds_per_unit if told.least is None else told.least
        slots = max(1, state.slots_total)
        can = cls(rates, state.max_size, state.max_seconds, state.buffer_s, slots)
        return replace(can, fastest=replace(can, rates=least))

    @property
    def at_best(self) -> "Ability":
        """The best-case ability: the instance is never faster."""
        return self.fastest or self

    def work(self, plan: ClipPlan) -> Work:
        return {stage: units * self.rates[stage] for stage, units in plan.units.items()}


NOMINAL_ABILITY: Final = Ability(
    {stage: BUDGETS[stage].target_s / units for stage, units in NOMINAL.units.items()}
)
"""The ability of an instance that reports none."""


class ClipNeeds:
    """One clip's request, and its deadline."""

    def __init__(self, recipe: Recipe, deadline_at: float, *, degrade: bool) -> None:
        self.deadline_at = deadline_at
        self._recipe = recipe
        self._degrade = degrade
        self._plans: dict[tuple[int, float], tuple[ClipPlan, ClipPlan]] = {}
        """Plans of the complete clip and of the acceptable minimum, by maximum size and seconds."""
        self._least_s: dict[Ability, float] = {}

    def by(self, deadline_at: float) -> "ClipNeeds":
        other = copy.copy(self)
        other.deadline_at = deadline_at
        return other

    def whole(self, ability: Ability) -> ClipPlan:
        return self._plans_of(ability)[0]

    def least(self, ability: Ability) -> ClipPlan:
        """The minimum acceptable plan if time is short."""
        return self._plans_of(ability)[1]

    def _plans_of(self, ability: Ability) -> tuple[ClipPlan, ClipPlan]:
        limits = (ability.max_size, ability.max_seconds)
        if limits not in self._plans:
            whole = asked_for(self._recipe, *limits)
            self._plans[limits] = whole, least(whole) if self._degrade else whole
        return self._plans[limits]

    def fit(self, ability: Ability, fits: Callable[[ClipPlan], bool]) -> ClipPlan | None:
        """The best acceptable plan that ``fits``; None if none does."""
        whole = self.whole(ability)
        if self._degrade:
            return fit(whole, fits)
        return whole if fits(whole) else None

    def due_at(self, ability: Ability) -> float:
        """The time by which the clip's last stage must end."""
        return self.deadline_at - ability.buffer_s

    def start_by(self, ability: Ability) -> float:
        """The latest start with which some acceptable plan can still be in time."""
        if ability not in self._least_s:
            if len(self._least_s) >= _MAX_ABILITIES:  # limits the number of old abilities
                self._least_s.clear()
            self._least_s[ability] = alone_s(ability.work(self.least(ability)))
        return self.due_at(ability) - self._least_s[ability]

    def may_be_met(self, ability: Ability, now: float) -> bool:
        """Whether the clip could be in time there if it started now, in the best case."""
        return now <= self.start_by(ability.at_best)

    def is_known(self, ability: Ability) -> bool:
        """Whether all stages that the clip needs have run there recently."""
        least = ability.at_best.work(self.whole(ability))
        needed = self.whole(ability).units
        return all(least[stage] > 0 for stage in ClipStage if needed[stage])


@dataclass(slots=True)
class Begun:
    """A clip on an instance: its plan, and the progress of each stage in percent."""

    plan: ClipPlan
    percents: Mapping[str, int] = field(default_factory=dict)

    def left(self, ability: Ability) -> Work:
        """The remaining work there, with the current ability."""
        return {
            stage: work_s * (1 - min(100, self.percents.get(stage, 0)) / 100)
            for stage, work_s in ability.work(self.plan).items()
        }


class InstanceTimeline:
    """Predicted times at which one instance's leases and stages become free."""

    def __init__(
        self, ability: Ability, now: float, begun: Iterable[Begun], others_s: Sequence[float] = ()
    ) -> None:
        """``others_s``: seconds from ``now`` until leases that are not ours are free."""
        self.ability = ability
        self._leases = [now + max(0.0, s) for s in sorted(others_s)[-ability.slots :]]
        self._leases += [now] * (ability.slots - len(self._leases))
        heapq.heapify(self._leases)
        self._stages = dict.fromkeys(ClipStage, now)
        for one in begun:
            self.take(one.left(ability))

    @property
    def free_at(self) -> float:
        """When the next clip can start."""
        return self._leases[0]

    def finish(self, work: Work) -> float:
        """When ``work`` would finish if it were next."""
        return self._ends(work)[ClipStage.CHECK]

    def take(self, work: Work) -> None:
        """Put ``work`` next in line."""
        ends = self._ends(work)
        self._stages |= {stage: end for stage, end in ends.items() if work[stage]}
        heapq.heapreplace(self._leases, ends[ClipStage.CHECK])

    def _ends(self, work: Work) -> dict[ClipStage, float]:
        def end(stage: ClipStage, ready_at: float) -> float:
            work_s = work[stage]
            return max(ready_at, self._stages[stage]) + work_s if work_s else ready_at

        start = self._leases[0]
        speech, portrait = end(ClipStage.SPEECH, start), end(ClipStage.PORTRAIT, start)
        video = end(ClipStage.VIDEO, max(speech, portrait))
        ends = speech, portrait, video, end(ClipStage.CHECK, video)
        return dict(zip(ClipStage, ends, strict=True))


class Expected(NamedTuple):
    """Forecast for a clip. Times are on the clock."""

    address: str
    plan: ClipPlan
    finish_at: float
    done_at: float
    """The finish, and the time that is kept back."""
    is_in_time: bool


def expected_on(address: str, needs: ClipNeeds, line: InstanceTimeline) -> Expected:
    """The best plan of ``needs`` that ``line`` would finish in time, otherwise the minimum plan."""
    ability = line.ability
    due_at = needs.due_at(ability)
    in_time = needs.fit(ability, lambda plan: line.finish(ability.work(plan)) <= due_at)
    plan = in_time or needs.least(ability)
    finish_at = line.finish(ability.work(plan))
    return Expected(address, plan, finish_at, finish_at + ability.buffer_s, in_time is not None)


def place(needs: ClipNeeds, lines: Mapping[str, InstanceTimeline]) -> Expected | None:
    """The earliest finish in time, or the earliest finish if none is in time; None without an
    instance."""
    found = [expected_on(address, needs, line) for address, line in lines.items()]
    return min(found, key=lambda each: (not each.is_in_time, each.finish_at), default=None)


def forecast(
    all_needs: Iterable[ClipNeeds], lines: Mapping[str, InstanceTimeline]
) -> list[Expected | None]:
    """Forecasts for the waiting clips, in order. A clip that will be late delays no other clip.
    Advances ``lines``."""
    expected = []
    for needs in all_needs:
        found = place(needs, lines)
        if found is not None and found.is_in_time:
            line = lines[found.address]
            line.take(line.ability.work(found.plan))
        expected.append(found)
    return expected
