"""Chances are corrected by what they came to, and the time that a promise takes is learnt from
those before it: the stated share is kept."""

import math
import random

import pytest

from orchestrator.prediction.promises import BROKEN, Stretch
from orchestrator.prediction.quotes import BINS, HALF_LIFE, Reliability
from tests.support.cases import for_each

GRID = [at / 50 for at in range(51)]


def test_what_a_chance_came_to_is_what_it_means_and_more_is_never_less() -> None:
    found, rng = Reliability(), random.Random(1)
    for _ in range(2000):
        chance = rng.random()
        found.add(chance, met=rng.random() < chance**3)  # far too hopeful
    for chance in (0.3, 0.5, 0.8):
        assert found.calibrated(chance) == pytest.approx(chance**3, abs=0.12)
    values = [found.calibrated(chance) for chance in GRID]
    assert values == sorted(values)
    assert sum(one.given for one in found.bins) == 2000
    assert len(found.bins) == BINS


def test_another_time_is_learnt_again() -> None:
    found = Reliability()
    for _ in range(4 * HALF_LIFE):
        found.add(0.75, met=False)
    assert found.calibrated(0.75) < 0.1
    for _ in range(2 * HALF_LIFE):
        found.add(0.75, met=True)
    assert found.calibrated(0.75) > 0.7


def test_a_bin_that_contradicts_its_neighbours_is_pooled_with_them() -> None:
    found = Reliability()
    for _ in range(100):
        found.add(0.35, met=True)
        found.add(0.55, met=False)
    assert found.calibrated(0.35) == pytest.approx(found.calibrated(0.55), abs=0.1)


def kept_share(chance: float, needed: float, count: int) -> float:
    """Share of ``count`` promises kept by a service that has just started, where the logarithm
    of what one takes, over what was predicted, is ``needed`` and scatters by 0.3."""
    stretch, rng, kept = Stretch(BROKEN[chance]), random.Random(7), 0
    for _ in range(count):
        is_kept = rng.gauss(needed, 0.3) <= math.log(stretch.factor)
        stretch.learn(kept=is_kept)
        kept += is_kept
    return kept / count


@for_each("needed", [-1.2, -0.6, 0.0, 0.6])
@for_each("chance", [0.5, 0.9])
def test_the_stated_share_is_kept_however_wrong_the_prediction_is(
    chance: float, needed: float
) -> None:
    assert kept_share(chance, needed, 250) == pytest.approx(1 - BROKEN[chance], abs=0.035)


@for_each("needed", [-1.2, 0.0])
def test_of_a_hundred_with_99_percent_at_most_one_is_broken_in_the_long_run(needed: float) -> None:
    assert kept_share(0.99, needed, 2000) >= 1 - 2 * BROKEN[0.99]
