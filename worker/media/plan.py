"""What a slot will render, and what it gives up to be in time (SL-2, SL-5): degrade before refuse.

Given up in this order, each only as far as it must be: the check, every second frame, half of the
pixels of either side, the end of the speech. What is given up is said in the result.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from worker.media.recipe import Recipe

SAMPLE_RATE = 24_000
"""Of audio buffers, in Hz."""
CHARACTERS_PER_S = 14.0
"""Of speech at rate 1, until a voice has said how fast it is."""
MIN_FPS = 6
MIN_SIZE = 64
MIN_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class ClipPlan:
    """One clip. ``given_up`` says in words what is less than the recipe asks for."""

    seconds: float
    fps: int
    size: int
    has_check: bool
    given_up: tuple[str, ...] = ()

    @property
    def frames(self) -> int:
        """The picture never ends before the sound."""
        return max(1, math.ceil(self.seconds * self.fps - 1e-6))

    @property
    def samples(self) -> int:
        return round(self.seconds * SAMPLE_RATE)

    @property
    def video_units(self) -> float:
        """Pixels that are rendered, in millions."""
        return self.frames * self.size**2 / 1e6

    @property
    def image_units(self) -> float:
        """The portrait's, in millions."""
        return self.size**2 / 1e6


NOMINAL = ClipPlan(seconds=45.0, fps=24, size=512, has_check=True)
"""What the budgets of SL-1 are for."""
BUFFER_S = 5.0
"""Kept back of a deadline for what comes behind the pipeline (SL-2)."""


def asked_for(recipe: Recipe, max_size: int, max_seconds: float) -> ClipPlan:
    """What the recipe asks for, as far as buffers go. How long it is, is a guess."""
    size = min(recipe.video.size or max_size, max_size)
    most = min(recipe.video.seconds, max_seconds)
    guess = len(recipe.text) / (CHARACTERS_PER_S * recipe.voice.rate) + 0.5
    smaller = (f"{size} pixels instead of {recipe.video.size}",) if size < recipe.video.size else ()
    return ClipPlan(min(guess, most), recipe.video.fps, size, recipe.check.enabled, smaller)


def fit(plan: ClipPlan, fits: Callable[[ClipPlan], bool]) -> ClipPlan | None:
    """The best of ``plan`` that ``fits``; None when nothing does."""
    return next((each for each in ladder(plan) if fits(each)), None)


def ladder(plan: ClipPlan) -> Iterator[ClipPlan]:
    """``plan``, then less and less of it."""
    yield plan
    if plan.has_check:
        plan = replace(plan, has_check=False, given_up=(*plan.given_up, "no check"))
        yield plan
    kept, fps = plan.given_up, plan.fps
    if plan.fps // 2 >= MIN_FPS:
        said = f"{plan.fps // 2} frames a second instead of {fps}"
        plan = replace(plan, fps=plan.fps // 2, given_up=(*kept, said))
        yield plan
    kept, size = plan.given_up, plan.size
    while plan.size // 2 >= MIN_SIZE:
        said = f"{plan.size // 2} pixels instead of {size}"
        plan = replace(plan, size=plan.size // 2, given_up=(*kept, said))
        yield plan
    kept, seconds = plan.given_up, plan.seconds
    while plan.seconds / 2 >= MIN_SECONDS:
        said = f"{plan.seconds / 2:.1f} s instead of {seconds:.1f}"
        plan = replace(plan, seconds=plan.seconds / 2, given_up=(*kept, said))
        yield plan
