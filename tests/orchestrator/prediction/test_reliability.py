"""Chances that are corrected by what they came to."""

import random

import pytest

from orchestrator.prediction.quotes import BINS, HALF_LIFE, Reliability

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


def test_another_time_is_learnt_anew() -> None:
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
