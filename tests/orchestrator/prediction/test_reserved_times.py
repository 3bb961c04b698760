"""How much time a reservation takes is learnt from those before it: the stated share is kept."""

import math
import random
from typing import Any

import pytest

from orchestrator.prediction.quotes import BROKEN, Quotes
from tests.support.cases import for_each

NOTHING: Any = None


def kept_share(chance: float, needed: float, count: int) -> float:
    """Share of ``count`` reservations kept by a service that has just started, where the logarithm
    of what one takes, over what was predicted, is ``needed`` and scatters by 0.3."""
    quotes = Quotes(NOTHING, NOTHING, NOTHING, NOTHING, NOTHING)
    rng, kept = random.Random(7), 0
    for _ in range(count):
        is_kept = rng.gauss(needed, 0.3) <= math.log(quotes._stretch[chance].factor)
        quotes._used(chance, is_kept)
        kept += is_kept
    return kept / count


@for_each("needed", [-1.2, -0.6, 0.0, 0.6])
@for_each("chance", [0.5, 0.9])
def test_the_stated_share_is_kept_however_wrong_the_prediction_is(
    chance: float, needed: float
) -> None:
    assert kept_share(chance, needed, 250) == pytest.approx(chance, abs=0.035)


@for_each("needed", [-1.2, 0.0])
def test_of_a_hundred_with_99_percent_at_most_one_is_broken_in_the_long_run(needed: float) -> None:
    assert kept_share(0.99, needed, 2000) >= 1 - 2 * BROKEN[0.99]
