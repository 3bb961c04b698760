"""Statistics against plain definitions."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf.report.stats import bootstrap, median, percentile

VALUES = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=50)


@given(VALUES)
def test_median_is_the_median(values: list[float]) -> None:
    assert median(values) == pytest.approx(statistics.median(values), abs=1e-6)


@given(VALUES, st.floats(0, 100), st.floats(0, 100))
def test_percentiles_are_ordered_and_inside(values: list[float], p: float, q: float) -> None:
    low, high = percentile(values, min(p, q)), percentile(values, max(p, q))
    assert min(values) <= low <= high + 1e-6 <= max(values) + 2e-6


def test_percentile_interpolates() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([10.0, 20.0], 95) == pytest.approx(19.5)


def test_nothing_has_no_percentile() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
    with pytest.raises(ValueError, match="0 to 100"):
        percentile([1.0], 101)


def test_bootstrap_encloses_a_stable_statistic() -> None:
    values = [float(v) for v in range(100)]
    low, high = bootstrap(values, median, random.Random(1))
    assert 0 < low <= 49.5 <= high < 99
    assert (low, high) == bootstrap(values, median, random.Random(1))
