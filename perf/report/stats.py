"""Medians, percentiles and spread of samples, without assumptions about their distribution."""

import math
import random
from collections.abc import Callable, Sequence


def percentile(values: Sequence[float], q: float) -> float:
    """The ``q``-th percentile (0 to 100) with linear interpolation between ranks.

    Raises ``ValueError`` without values or for a ``q`` out of range.
    """
    if not values:
        raise ValueError("no values to take a percentile of")
    if not 0 <= q <= 100:
        raise ValueError(f"q must be from 0 to 100, got {q}")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * q / 100
    below = math.floor(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def median(values: Sequence[float]) -> float:
    """The 50th percentile."""
    return percentile(values, 50)


def bootstrap(
    values: Sequence[float],
    statistic: Callable[[Sequence[float]], float],
    rng: random.Random,
    rounds: int = 200,
) -> tuple[float, float]:
    """A 95 % interval of ``statistic`` over resamples of ``values`` (Efron's percentile method)."""
    drawn = [statistic(rng.choices(values, k=len(values))) for _ in range(rounds)]
    return percentile(drawn, 2.5), percentile(drawn, 97.5)
