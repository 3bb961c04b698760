"""What of a recipe can be rendered in the time that is left (SL-2)."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from worker.media.budgets import StageTimes
from worker.media.errors import OutOfTime
from worker.media.plan import ClipPlan, fit, least

Pace = Callable[[StageTimes, float], float]
"""Which of its answers is taken of a stage, for how much work: seconds."""
LIKELY: Final[Pace] = StageTimes.likely_s
HOPED: Final[Pace] = StageTimes.hoped_s
LEAST: Final[Pace] = StageTimes.least_s


@dataclass(frozen=True, slots=True)
class Prediction:
    """How long stages take with the providers that one recipe chose; ``buffer_s`` is kept back of
    every deadline."""

    speech: StageTimes
    portrait: StageTimes
    video: StageTimes
    check: StageTimes
    buffer_s: float

    def all_s(self, plan: ClipPlan, pace: Pace) -> float:
        """What all of ``plan`` takes."""
        return self.first_s(plan, pace) + self.from_video_s(plan, pace)

    def first_s(self, plan: ClipPlan, pace: Pace) -> float:
        """Speech beside the portrait."""
        return max(pace(self.speech, plan.seconds), pace(self.portrait, plan.image_units))

    def from_video_s(self, plan: ClipPlan, pace: Pace) -> float:
        """Without speech and portrait."""
        return pace(self.video, plan.video_units) + self.check_s(plan, pace)

    def check_s(self, plan: ClipPlan, pace: Pace) -> float:
        """Of the check alone."""
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
        """``plan``, or with ``degrade`` the best of it that there is time for. What is certain to
        be late raises ``OutOfTime``; what only probably is has its try."""
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
