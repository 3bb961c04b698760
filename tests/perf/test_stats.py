"""Statistics against plain definitions."""

import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perf.report.stats import bootstrap, median, percentile


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=50))
def test_median_is_the_median(values: list[float]) -> None:
    assert median(values) == pytest.approx(statistics.median(values), abs=1e-6)


def test_percentile_interpolates() -> None:
    assert percentile([10.0, 20.0], 95) == pytest.approx(19.5)
    for values, q in (([], 50), ([1.0], 101)):
        with pytest.raises(ValueError):
            percentile(values, q)


def test_bootstrap_encloses_a_stable_statistic() -> None:
    values = [float(v) for v in range(100)]
    low, high = bootstrap(values, median, random.Random(1))
    assert 0 < low <= 49.5 <= high < 99
