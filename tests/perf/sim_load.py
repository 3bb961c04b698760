"""The load that tests of the simulator share."""

from perf.goodput.policies import Policy
from perf.sim.arrivals import Scenario
from perf.sim.scenes import SPEED, UNBOUNDED
from perf.sim.simulate import Fleet, SimRun, simulate

SCENARIO = Scenario(SPEED)
SEED = 7
CAPACITY = 28.66323349824144
"""Requests per second of ``SCENARIO`` that ``FLEET`` can do; ``test_sim`` holds it to the fleet."""


def run_policy(
    policy: Policy, scenario: Scenario, fleet: Fleet, per_s: float, seconds: float, seed: int
) -> SimRun:
    """Simulate one policy under one load."""
    return simulate(
        scenario.arrivals(per_s, seconds, seed),
        fleet,
        UNBOUNDED | dict(policy.settings),
        seed=seed,
        states_deadline=policy.states_deadline,
    )
