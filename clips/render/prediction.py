"""Predicts which parts of a recipe can be rendered in the remaining time (SL-2)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from clips.plan.budgets import StageTimes
from clips.plan.plan import ClipPlan, fit, least
from clips.render.errors import OutOfTime

Pace = Callable[[StageTimes, float], float]
"""A method of ``StageTimes``: seconds that a stage takes for an amount of work."""
LIKELY: Final[Pace] = StageTimes.likely_s
HOPED: Final[Pace] = StageTimes.hoped_s
LEAST: Final[Pace] = StageTimes.least_s


@dataclass(frozen=True, slots=True)
class ClipPrediction:
    """Predicts times of the stages; ``buffer_s`` seconds of every deadline are reserved."""

    speech: StageTimes
    portrait: StageTimes
    video: StageTimes
    check: StageTimes
    buffer_s: float

    def all_s(self, plan: ClipPlan, pace: Pace) -> float:
        """Seconds that all of ``plan`` takes."""
        return self.first_s(plan, pace) + self.from_video_s(plan, pace)

    def first_s(self, plan: ClipPlan, pace: Pace) -> float:
        """Seconds that speech and portrait take in parallel."""
        return max(pace(self.speech, plan.seconds), pace(self.portrait, plan.image_units))

    def from_video_s(self, plan: ClipPlan, pace: Pace) -> float:
        """Seconds that video and check take."""
        return pace(self.video, plan.video_units) + self.check_s(plan, pace)

    def check_s(self, plan: ClipPlan, pace: Pace) -> float:
        """Seconds that the check takes; 0 without one."""
        return pace(self.check, 1.0) if plan.has_check else 0.0

    def fitted(
        self,
        plan: ClipPlan,
        where: str,
        remaining_s: float,
        takes_s: Callable[[ClipPlan, Pace], float],
        *,
        degrade: bool,
    ) -> ClipPlan:
        """``plan``, or with ``degrade`` the best version of it that fits in the time. Raises
        ``OutOfTime`` if it is certain to be late; if it is only probably late, it is tried."""
        left_s = remaining_s - self.buffer_s
        if degrade:
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
