"""Plans which parts of a clip to render or drop to be in time (SL-2, SL-5): degrade before refuse.
Parts are dropped in this order, each only as far as needed: the check, every second frame, half of
the pixels of either side, the end of the speech. The result lists the dropped parts.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from clips.plan.budgets import ClipStage
from clips.plan.recipe import Recipe

SAMPLE_RATE = 24_000
"""Sample rate of audio buffers in Hz."""
CHARACTERS_PER_S = 14.0
"""Estimated characters per second of speech at rate 1."""
MIN_FPS = 6
MIN_SIZE = 64
MIN_SECONDS = 1.0
_SHORTER_S = 0.05
"""Minimum loss in seconds to report."""


@dataclass(frozen=True, slots=True)
class ClipPlan:
    """Plan of one clip. ``asked``: the requested plan if this one is less; None otherwise."""

    seconds: float
    fps: int
    size: int
    has_check: bool
    asked: "ClipPlan | None" = None

    @property
    def given_up(self) -> tuple[str, ...]:
        """The dropped parts, in words."""
        asked = self.asked
        if asked is None:
            return ()
        each = (
            (asked.has_check and not self.has_check, "no check"),
            (self.fps < asked.fps, f"{self.fps} frames a second instead of {asked.fps}"),
            (self.size < asked.size, f"{self.size} pixels instead of {asked.size}"),
            (
                self.seconds < asked.seconds - _SHORTER_S,
                f"{self.seconds:.1f} s instead of {asked.seconds:.1f}",
            ),
        )
        return tuple(words for is_less, words in each if is_less)

    @property
    def frames(self) -> int:
        """Number of frames, rounded up: the picture never ends before the sound."""
        return max(1, math.ceil(self.seconds * self.fps - 1e-6))

    @property
    def samples(self) -> int:
        return round(self.seconds * SAMPLE_RATE)

    @property
    def units(self) -> dict[ClipStage, float]:
        """Work of each stage: seconds of speech, millions of pixels, checks."""
        pixels = self.size**2 / 1e6
        return {
            ClipStage.SPEECH: self.seconds,
            ClipStage.PORTRAIT: pixels,
            ClipStage.VIDEO: self.frames * pixels,
            ClipStage.CHECK: float(self.has_check),
        }


NOMINAL = ClipPlan(seconds=45.0, fps=24, size=512, has_check=True)
"""The clip for which SL-1's budgets are."""
BUFFER_S = 5.0
"""Seconds of a deadline reserved for the steps after the pipeline (SL-2)."""


def asked_for(recipe: Recipe, max_size: int, max_seconds: float) -> ClipPlan:
    """The recipe's full plan, within the buffers' sizes. Its length in seconds is an estimate."""
    size = min(recipe.video.size or max_size, max_size)
    most = min(recipe.video.seconds, max_seconds)
    guess = len(recipe.text) / (CHARACTERS_PER_S * recipe.voice.rate) + 0.5
    full = ClipPlan(min(guess, most), recipe.video.fps, size, recipe.check.enabled)
    if size < recipe.video.size:
        return replace(full, asked=replace(full, size=recipe.video.size))
    return full


def fit(plan: ClipPlan, fits: Callable[[ClipPlan], bool]) -> ClipPlan | None:
    """The best reduction of ``plan`` that ``fits``; None if none does."""
    found = next((each for each in ladder(plan) if fits(each)), None)
    if found is None or found is plan:
        return found
    # Restore what was dropped without saving the time.
    while found.size * 2 <= plan.size and fits(larger := replace(found, size=found.size * 2)):
        found = larger
    if fits(smoother := replace(found, fps=plan.fps)):
        found = smoother
    if fits(checked := replace(found, has_check=plan.has_check)):
        found = checked
    return found


def least(plan: ClipPlan) -> ClipPlan:
    """The minimum of ``plan``: the last step of its ``ladder``."""
    *_, last = ladder(plan)
    return last


def ladder(plan: ClipPlan) -> Iterator[ClipPlan]:
    """``plan``, then smaller and smaller versions of it."""
    yield plan
    plan = replace(plan, asked=plan.asked or plan)
    if plan.has_check:
        yield (plan := replace(plan, has_check=False))
    if plan.fps // 2 >= MIN_FPS:
        yield (plan := replace(plan, fps=plan.fps // 2))
    while plan.size // 2 >= MIN_SIZE:
        yield (plan := replace(plan, size=plan.size // 2))
    while plan.seconds / 2 >= MIN_SECONDS:
        yield (plan := replace(plan, seconds=plan.seconds / 2))
