"""Slots are divided by what members ask for, and never given twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.state.shares import shares_of


@pytest.mark.parametrize(
    ("slots", "demands", "shares"),
    [
        (8, {"a": 0, "b": 0}, {"a": 4, "b": 4}),
        (8, {"a": 100, "b": 0}, {"a": 8, "b": 1}),
        (8, {"a": 100, "b": 2}, {"a": 6, "b": 2}),
        (8, {"a": 3, "b": 1}, {"a": 5, "b": 3}),
        (8, {"a": 9, "b": 9, "c": 9}, {"a": 3, "b": 3, "c": 2}),
    ],
)
def test_shares(slots: int, demands: dict[str, int], shares: dict[str, int]) -> None:
    assert shares_of(slots, demands) == shares


@given(
    st.integers(1, 300),
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(0, 500), min_size=1),
)
def test_no_slot_is_given_twice_and_none_is_kept_back(slots: int, demands: dict[str, int]) -> None:
    shares = shares_of(slots, demands)
    assert shares.keys() == demands.keys() and min(shares.values()) >= 1
    assert slots <= sum(shares.values()) < slots + len(demands)
    fair = slots // len(demands)
    assert all(shares[tag] >= min(count, fair) for tag, count in demands.items())
    assert shares == shares_of(slots, dict(reversed(demands.items())))
