"""A clip while it is rendered."""

from dataclasses import dataclass, field

import torch

from clips.plan.budgets import Stage
from clips.plan.plan import ClipPlan
from clips.render.buffers import Lease
from clips.render.check import CheckResult


@dataclass(slots=True)
class Clip:
    """A clip as far as it is rendered: views of its lease's buffers, until that is closed."""

    lease: Lease
    plan: ClipPlan
    samples: int = 0
    frames: int = 0
    portrait_size: int = 0
    """Pixels of either side of the portrait; 0 while there is none."""
    check: CheckResult | None = None
    has_failed_check: bool = False
    spared: bool = False
    """Whether the clip was once certain to be late and continued."""
    stage_ms: dict[Stage, float] = field(default_factory=dict)
    total_ms: float = 0.0

    @property
    def given_up(self) -> tuple[str, ...]:
        """What was dropped, in words."""
        failed = ("the check failed",) if self.has_failed_check else ()
        return (*self.plan.given_up, *failed)

    @property
    def audio(self) -> torch.Tensor:
        """``[samples]`` float32 at ``SAMPLE_RATE``."""
        return self.lease.audio(self.samples)

    @property
    def portrait(self) -> torch.Tensor:
        """``[3, size, size]`` float32."""
        return self.lease.actor(self.portrait_size)

    @property
    def video(self) -> torch.Tensor:
        """``[frames, 3, size, size]`` uint8."""
        return self.lease.video(self.frames, self.plan.size)


class Unfinished(Exception):
    """A clip was not finished: ``clip`` is what there is, its lease open; ``reason`` says why."""

    def __init__(self, clip: Clip, reason: Exception) -> None:
        super().__init__(str(reason))
        self.clip = clip
        self.reason = reason
