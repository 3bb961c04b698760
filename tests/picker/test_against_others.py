"""The picker beside what gateways do by themselves, among unlike pods, on virtual time."""

import random

import pytest

from tests.picker.pool import (
    ByPicker,
    LeastRequests,
    Policy,
    RoundRobin,
    Server,
    Speed,
    VirtualClock,
    arrivals,
    run,
)

SPEEDS = (
    Speed(8, 0.15, 0.02, 32),
    Speed(14, 0.3, 0.04, 32),
    Speed(30, 0.8, 0.1, 16),
    Speed(45, 1.0, 0.15, 8),
)
"""Pods of which the fastest makes sixteen times as many tokens as the slowest."""
ADDRESSES = [f"10.0.0.{number}:8000" for number in range(len(SPEEDS))]
REQUESTS_PER_S = sum(speed.tokens_per_s for speed in SPEEDS) / 104
"""About what the pods can serve: an answer has 104 tokens on average."""
SECONDS = 12.0


def met(policy: Policy, clock: VirtualClock, load: float, seed: int) -> float:
    work = list(arrivals(random.Random(seed), load * REQUESTS_PER_S, SECONDS))
    servers = [Server(name, speed) for name, speed in zip(ADDRESSES, SPEEDS, strict=True)]
    return run(policy, clock, servers, work)


@pytest.mark.parametrize(
    ("load", "least_gain"), [pytest.param(0.8, 1.06, marks=pytest.mark.slow), (1.3, 1.03)]
)
def test_more_deadlines_are_kept_than_by_round_robin_or_least_requests(
    load: float, least_gain: float
) -> None:
    """Below the pods' capacity and above it. Least requests knows every pod's queue at every
    moment; the picker has polls of half a second and what it has routed itself."""
    turns = met(RoundRobin(), VirtualClock(), load, 1)
    least = met(LeastRequests(), VirtualClock(), load, 1)
    clock = VirtualClock()
    picker = ByPicker(clock, ADDRESSES)
    picked = met(picker, clock, load, 1)
    print(f"load {load}: round robin {turns:.3f}, least requests {least:.3f}, picker {picked:.3f}")
    assert picked > least_gain * least > turns
    # No length was stated, so nothing was certain to miss, and nothing was refused.
    assert picker.refused == 0
    assert not any(pod.flights for pod in picker.pods)
