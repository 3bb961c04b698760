"""Predicts which parts of a recipe can be rendered in the remaining time (SL-2)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from clips.plan.budgets import ClipStage, StageTimes
from clips.plan.plan import ClipPlan, fit, least
from clips.render.clip import ClipOrder
from clips.render.errors import OutOfTime

Pace = Callable[[StageTimes, float], float]
"""A method of ``StageTimes``: seconds that a stage takes for an amount of work."""
LIKELY: Final[Pace] = StageTimes.likely_s
HOPED: Final[Pace] = StageTimes.hoped_s
LEAST: Final[Pace] = StageTimes.least_s


@dataclass(frozen=True, slots=True)
class ClipPrediction:
    """Predicts times of the stages; ``buffer_s`` seconds of every deadline are reserved."""

    times: Mapping[ClipStage, StageTimes]
    buffer_s: float

    def stage_s(self, stage: ClipStage, plan: ClipPlan, pace: Pace) -> float:
        """Seconds that a stage takes for ``plan``."""
        return pace(self.times[stage], plan.units[stage])

    def first_s(self, plan: ClipPlan, pace: Pace) -> float:
        """Seconds that speech and portrait take in parallel."""
        both = ClipStage.SPEECH, ClipStage.PORTRAIT
        return max(self.stage_s(stage, plan, pace) for stage in both)

    def from_video_s(self, plan: ClipPlan, pace: Pace) -> float:
        """Seconds that video and check take."""
        both = ClipStage.VIDEO, ClipStage.CHECK
        return sum(self.stage_s(stage, plan, pace) for stage in both)

    def all_s(self, plan: ClipPlan, pace: Pace) -> float:
        """Seconds that all of ``plan`` takes."""
        return self.first_s(plan, pace) + self.from_video_s(plan, pace)

    def fitted(
        self,
        plan: ClipPlan,
        where: str,
        order: ClipOrder,
        takes_s: Callable[[ClipPlan, Pace], float],
    ) -> ClipPlan:
        """``plan``, or the best version of it that fits in the time if parts may be dropped. Raises
        ``OutOfTime`` if it is certain to be late; if it is only probably late, it is tried."""
        remaining_s = order.left_s
        left_s = remaining_s - self.buffer_s
        if order.degrade:
            found = fit(plan, lambda one: takes_s(one, HOPED) <= left_s)
            if found is not None:
                return found
            plan = least(plan)
        if takes_s(plan, LEAST) <= left_s:
            return plan
        raise OutOfTime(
            where,
            f"{max(0.0, remaining_s):.1f} s are left, {self.buffer_s:g} of them kept"
            f" back, and the rest takes {takes_s(plan, LEAST):.1f} s at the least",
        )
