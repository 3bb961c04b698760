"""DL-19 on the simulator: urgent work overtakes batch work, wherever either of them waits."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from orchestrator.tasks.job import Priority
from perf.load.cells import DEMO_COST
from perf.sim.arrivals import SimArrival
from perf.sim.crowds import TOKENS, newcomers
from perf.sim.replay.worker import WorkerSpec
from perf.sim.scenes import FLEET, UNBOUNDED
from perf.sim.simulate import Fleet, SimResult, SimRun, simulate
from protocol import Outcome
from tests.perf.sim_load import SEED
from tests.support.cases import for_each
from worker.runner.synthetic import StepCost

SLOTS = 64
COST = StepCost(20e-3, 0.0, 0.02e-3)
SPEC = WorkerSpec(COST, SLOTS, kv_tokens=SLOTS * 2048)
HALF_AN_HOUR_MS = 1_800_000.0


def batch(at_s: float = 0.1, tenant: str = "a", tokens: int = 600) -> SimArrival:
    """Its length is stated: it is certain to keep its slot for twelve seconds, at the least."""
    return SimArrival(at_s, 20, tokens, tokens, HALF_AN_HOUR_MS, tenant, Priority.BATCH)


def urgent(at_s: float, deadline_ms: float = 3000.0, tenant: str = "a") -> SimArrival:
    return SimArrival(at_s, 20, 5, 5, deadline_ms, tenant, Priority.INTERACTIVE)


def run(arrivals: Sequence[SimArrival], fleet: Fleet) -> SimRun:
    """No refusal is sampled: each verdict is the service's own."""
    return simulate(sorted(arrivals, key=lambda a: a.at_s), fleet, {}, seed=SEED, kept=-1)


def urgent_ones(ended: SimRun) -> list[SimResult]:
    return [r for r in ended.results if r.arrival.priority is Priority.INTERACTIVE]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "count"), [(0, 1), (3, 1), (90, 1), pytest.param(90, 2, marks=pytest.mark.slow)]
)
def test_dl19_urgent_requests_overtake_batch_work_that_fills_every_slot(
    more: int, count: int
) -> None:
    """However much of it waits next to them: nowhere, in the worker only, or in the queue too."""
    arrivals = [batch() for _ in range(SLOTS * count + more)]
    arrivals += [urgent(1.0 + 0.5 * i, 3000.0 + 1400.0 * i) for i in range(6)]
    for result in urgent_ones(run(arrivals, Fleet(SPEC, count))):
        assert result.outcome is Outcome.MET
        assert result.first_s - result.arrival.at_s < 0.25


def test_dl19_long_work_makes_room_again_and_again() -> None:
    """Each job is paused far more often than the four times that a short one is."""
    few = Fleet(replace(SPEC, slots=2), count=1)
    arrivals = [batch(tokens=1500), batch(tokens=1500), *(urgent(1.0 + 0.4 * i) for i in range(40))]
    ended = run(arrivals, few)
    assert {result.outcome for result in urgent_ones(ended)} == {Outcome.MET}
    assert sum(result.pauses for result in ended.results) == 40


@pytest.mark.slow
def test_or24_a_flood_of_one_tenant_delays_no_urgent_work_of_another() -> None:
    """It has had more interactive work done than the flood's tenant, so it is not its turn."""
    arrivals = [urgent(1.0 + 0.2 * i, tenant="calm") for i in range(8)]
    arrivals += [batch(0.1, "loud") for _ in range(160)]
    flood = [replace(batch(3.0, "loud"), priority=Priority.INTERACTIVE) for _ in range(150)]
    arrivals += flood + [urgent(4.0 + 0.5 * i, tenant="calm") for i in range(6)]
    ended = run(arrivals, Fleet(SPEC, count=1))
    calm = [result for result in ended.results if result.arrival.tenant == "calm"]
    assert len(calm) == 14 and {result.outcome for result in calm} == {Outcome.MET}
    assert max(result.first_s - result.arrival.at_s for result in calm) < 0.5


@for_each(("instances", "rows", "behind", "many"), [(1, 64, 32, 32), (2, 32, 32, 1)])
def test_dl15_newcomers_that_only_fewer_rows_are_fast_enough_for_are_met(
    instances: int, rows: int, behind: int, many: int
) -> None:
    """They have twice what they take alone; those that make room for them have a minute."""
    alone_ms = 1000 * TOKENS * (DEMO_COST.step_s + DEMO_COST.row_s * min(rows, many))
    arrivals = newcomers(behind, many, 2 * alone_ms, stated=True)
    fleet = Fleet(WorkerSpec(DEMO_COST, rows, kv_tokens=64 * 2048), instances)
    ended = simulate(arrivals, fleet, UNBOUNDED, seed=1, linger_s=10.0)
    assert {result.outcome for result in ended.results} == {Outcome.MET}


@pytest.mark.slow
@for_each(("deadline_ms", "least"), [(4800.0, 16), (7000.0, 32)])
def test_dl15_urgent_work_is_met_although_memory_holds_no_paused_job(
    deadline_ms: float, least: int
) -> None:
    """Jobs with a minute fill memory and have no token yet. Earliest deadline first, which leaves
    them in its queue, meets 20 and 32 of the 32 newcomers."""
    one = SimArrival(60.0, 400, 64, 64, 60_000.0, "t", Priority.INTERACTIVE)
    arrivals = [replace(one, at_s=0.3 * i, prompt_tokens=64 + 32 * (i % 20)) for i in range(120)]
    arrivals += [one] * 48 + [replace(one, at_s=60.1, deadline_ms=deadline_ms)] * 32
    results = simulate(arrivals, FLEET, {}, seed=1, linger_s=20.0).results
    assert sum(result.met for result in results[-32:]) >= least
    assert all(result.met for result in results[:-32])
