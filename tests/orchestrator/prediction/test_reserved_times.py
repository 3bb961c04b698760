"""DL-16: how much time a promise takes is learnt from earlier ones; the stated share is kept."""

import math
import random

import pytest

from orchestrator.prediction.promises import BROKEN, Stretch
from tests.support.cases import for_each


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
