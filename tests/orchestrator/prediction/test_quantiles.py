"""DL-19: quantiles follow a change of regime, as fast for the better as for the worse."""

import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.prediction.quantiles import Quantiles

SIZE = 32


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    factor=st.sampled_from([10.0, 0.1, 3.0, 1 / 3]),
    before=st.integers(20, 400),
    noise=st.floats(0.0, 0.2),
)
def test_dl19_another_regime_shows_as_soon_either_way(
    seed: int, factor: float, before: int, noise: float
) -> None:
    """Round trips on a crowded machine, say, and then on a calm one; or the other way round."""
    rng = random.Random(seed)
    window = Quantiles([5.0] * 9, SIZE)
    for _ in range(before):
        window.add(20 * math.exp(rng.gauss(0, noise)))
    for _ in range(SIZE):
        window.add(20 * factor * math.exp(rng.gauss(0, noise)))
    for share in (0.1, 0.5, 0.98):
        assert window.at(share) / (20 * factor) == pytest.approx(1, abs=0.9)
    assert window.at(0.5) / (20 * factor) == pytest.approx(1, abs=0.5)
