"""What tests of the simulator share."""

import pytest

from tests.perf.sim_load import CAPACITY


@pytest.fixture
def capacity() -> float:
    """Requests per second of the plain load that the plain fleet can do."""
    return CAPACITY
