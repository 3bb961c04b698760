"""Slices of ``make chaos`` (OR-5, OR-14, OR-17, OR-23): an orchestrator is killed under load, and
its clients are back before its lanes are; so is one of each kind of process of a fleet."""

import pytest

from perf.chaos import checks, fleet
from perf.chaos.__main__ import play
from perf.chaos.clients import KINDS, ChaosLedger
from perf.chaos.faults import ROLLING_RESTART, kills, triton_kills
from perf.chaos.world import LaneGate, World, orchestrating, running
from perf.stack.stack import StackSpec
from perf.stack.store import store_program
from tests.e2e.conftest import Stack

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.usefixtures("idle_afterwards")
async def test_every_request_is_accounted_for_though_an_orchestrator_dies(paced: Stack) -> None:
    """Every durable task is met, to the letter and once; so is everything that a restart finds."""
    ledger = ChaosLedger()
    (kill,) = (fault for fault in kills(0) if fault.name.endswith("0, its lanes shut"))
    async with (
        LaneGate([paced.triton.grpc]) as gate,
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


async def test_or17_a_fleet_ends_each_durable_task_once_who_is_killed() -> None:
    """Three orchestrators, two Tritons, a store: one of each is killed."""
    program = store_program()
    if program is None:
        pytest.skip("needs redis-server or valkey-server (Debian: apt install redis-server)")
    ledger = ChaosLedger()
    async with fleet.running(StackSpec("synthetic-paced", step_ms=10.0), program) as running:
        plan = [fleet.faults_of(running, 0)[0], triton_kills(1)[0], fleet.store_faults(running)[0]]
        rows = await play(
            running.world, plan, ledger, seed=1, per_kind=1, roams=True, settle=fleet.settled
        )
        stored = await fleet.judge_store(running.store, ledger)
    assert ledger.faults == []
    assert len(rows) == 3
    assert stored["tasks"] > 0 and stored["open"] == stored["unknown"] == 0


async def test_or14_an_upgrade_of_everything_under_load_is_noticed_by_nobody() -> None:
    """Both orchestrators, then both Tritons, are drained and started again one by one."""
    ledger = ChaosLedger()
    async with running(StackSpec("synthetic-paced", deterministic=True)) as world:
        (row,) = await play(world, [ROLLING_RESTART], ledger, seed=1, per_kind=1)
        pids = world.pids()
        for process in world.orchestrators:
            await process.stop(5.0)
        facts = checks.read_journals(world.journals, ledger)
    checks.judge_leaks(pids, ledger)
    assert ledger.faults == []
    assert facts.outcomes == {"met": len(ledger.durable_ids)}
    assert sum(row.met.values()) > len(KINDS)
