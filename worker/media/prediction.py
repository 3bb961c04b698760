"""What of a recipe can be rendered in the time that is left (SL-2)."""

from collections.abc import Callable
from dataclasses import dataclass

from worker.media.budgets import StageTimes
from worker.media.errors import OutOfTime
from worker.media.plan import ClipPlan, fit


@dataclass(frozen=True, slots=True)
class Prediction:
    """How long stages take with the providers that one recipe chose; ``buffer_s`` is kept back of
    every deadline."""

    speech: StageTimes
    portrait: StageTimes
    video: StageTimes
    check: StageTimes
    buffer_s: float

    def all_s(self, plan: ClipPlan) -> float:
        """What all of ``plan`` takes, nearly always."""
        first_s = max(
            self.speech.predicted_s(plan.seconds), self.portrait.predicted_s(plan.image_units)
        )
        return first_s + self.from_video_s(plan)

    def from_video_s(self, plan: ClipPlan) -> float:
        """Without speech and portrait."""
        check_s = self.check.predicted_s(1.0) if plan.has_check else 0.0
        return self.video.predicted_s(plan.video_units) + check_s

    def fitted(
        self,
        plan: ClipPlan,
        where: str,
        remaining_s: float,
        predicted_s: Callable[[ClipPlan], float],
        *,
        degrade: bool,
    ) -> ClipPlan:
        """``plan``, or what of it fits. Raises ``OutOfTime``."""
        left_s = remaining_s - self.buffer_s

        def fits(one: ClipPlan) -> bool:
            return predicted_s(one) <= left_s

        if fits(plan):
            return plan
        less = fit(plan, fits) if degrade else None
        if less is None:
            raise OutOfTime(
                where,
                f"{max(0.0, remaining_s):.1f} s are left, {self.buffer_s:g} of them kept"
                f" back, and the rest takes {predicted_s(plan):.1f} s",
            )
        return less
