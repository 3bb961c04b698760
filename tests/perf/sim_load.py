"""The load that tests of the simulator share."""

from perf.sim.__main__ import SPEED
from perf.sim.arrivals import Scenario

SCENARIO = Scenario(SPEED)
SEED = 7
CAPACITY = 28.66323349824144
"""Requests per second of ``SCENARIO`` that ``FLEET`` can do; ``test_sim`` holds it to the fleet."""
