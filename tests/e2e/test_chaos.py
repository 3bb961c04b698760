"""A slice of ``make chaos`` (OR-5, OR-14, OR-23): an orchestrator is killed under load, and its
clients are back before its lanes are."""

import pytest

from perf.chaos import checks
from perf.chaos.__main__ import play
from perf.chaos.clients import KINDS, Ledger
from perf.chaos.faults import kills
from perf.chaos.gates import Gate
from perf.chaos.world import World, orchestrating
from tests.e2e.conftest import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.usefixtures("idle_afterwards")
async def test_every_request_is_accounted_for_though_an_orchestrator_dies(paced: Stack) -> None:
    """Every durable task is met, to the letter and once; so is everything that a restart finds."""
    ledger = Ledger()
    (kill,) = (fault for fault in kills(0) if fault.name.endswith("0, its lanes shut"))
    async with (
        Gate([paced.triton.grpc]) as gate,
        orchestrating([gate.addresses]) as (orchestrators, journals),
    ):
        world = World([paced.triton.instance], orchestrators, journals, [gate])
        rows = await play(world, [kill], ledger, seed=1, per_kind=1, seconds=0.0)
        pids = world.pids() - {paced.triton.server_pid, paced.triton.stub_pid}
        for process in orchestrators:
            await process.stop(5.0)
        facts = checks.read_journals(journals, ledger)
    ledger.memory_prefixes.clear()  # the Triton stays for other tests
    checks.judge_leaks(pids, ledger)
    assert ledger.faults == []
    assert facts.outcomes == {"met": len(ledger.durable_ids)}
    assert len(rows) == 1
    assert {kind for counts in ledger.outcomes.values() for kind, _ in counts} == set(KINDS)
