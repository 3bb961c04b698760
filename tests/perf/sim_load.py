"""The load that tests of the simulator share."""

from functools import cache

from perf.sim.__main__ import FLEET, SPEED, capacity_per_s
from perf.sim.arrivals import Scenario

SCENARIO = Scenario(SPEED)
SEED = 7


@cache
def plain_capacity() -> float:
    """Requests per second of ``SCENARIO`` that ``FLEET`` can do."""
    return capacity_per_s(SCENARIO, FLEET, SEED)
