"""A slice of ``python -m perf.chaos.batches``: the orchestrator is killed as it begins a batch, as
it serves it and as it closes its files."""

import pytest

from perf.chaos.batches import BatchFindings, run
from tests.e2e.conftest import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.usefixtures("idle_afterwards")
async def test_no_line_is_lost_or_doubled_though_the_orchestrator_is_killed(paced: Stack) -> None:
    found = BatchFindings(200)
    await run([paced.triton.grpc], found, seed=1, kills=2)
    assert found.faults == []
    assert found.kills == {"checking": 1, "closing its files": 1, "all over": 1}
    assert sorted(sent.entries.total() for sent in found.sent) == [40, 200]
