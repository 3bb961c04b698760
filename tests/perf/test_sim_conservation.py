"""DL-15 on the simulator: no slot idles while somebody waits, fresh services, the light load."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.service import Orchestrator
from orchestrator.tasks.job import Priority
from perf.goodput.policies import OURS, UNPREDICTED
from perf.sim.arrivals import SimArrival
from perf.sim.replay.worker import WorkerSpec
from perf.sim.scenes import FLEET
from perf.sim.simulate import Fleet, SimRun, simulate
from protocol import OnDeadline, Outcome
from tests.perf.sim_load import CAPACITY, SCENARIO, SEED, Summary, run_policy
from worker.runner.synthetic import StepCost

# ── the situations ───────────────────────────────────────────────────────────────────────

QUICK = StepCost(4e-3, 0.01e-3, 0.02e-3)
WIDE = Fleet(WorkerSpec(QUICK, 64, kv_tokens=64 * 2048, min_start_s=0.0), count=1)


def chat(at_s: float, length: int, **changes: object) -> SimArrival:
    """Ends by itself long before what it allows."""
    values: dict[str, object] = {
        "prompt_tokens": 20,
        "max_tokens": 1000,
        "deadline_ms": 2000.0,
        "tenant": "",
        "priority": Priority.INTERACTIVE,
    }
    return SimArrival(at_s, length=length, **(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("before", [0, pytest.param(12, marks=pytest.mark.slow)])
def test_dl15_chats_are_met_next_to_one_busy_slot_of_64(before: int) -> None:
    """On a fresh service, and on one that has only seen answers too long for any such deadline;
    whatever a chat wants at its deadline."""
    arrivals = [
        chat(1.0 + 4 * i, 900, prompt_tokens=10, deadline_ms=60_000.0) for i in range(before)
    ]
    begin = 6.0 + 4 * before
    arrivals.append(chat(begin, 900, prompt_tokens=10, deadline_ms=60_000.0))
    manners = [one for one in OnDeadline if one is not OnDeadline.FINISH]  # which needs a sampler
    for number, on_deadline in enumerate(manners, 1):
        arrivals.append(chat(begin + 0.5 * number, 11, on_deadline=on_deadline))
    run = simulate(arrivals, WIDE, {}, seed=SEED)
    assert {result.outcome for result in run.results} == {Outcome.MET}
    for result in run.results[-len(manners) :]:
        assert result.ended_s - result.arrival.at_s < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("at_s", [0.5, 12.0])
def test_dl15_five_mixed_clients_on_64_slots_are_all_served(at_s: float) -> None:
    """DL-7: nothing refused, and no first token later for a prediction."""
    rng = random.Random(3)
    arrivals = [
        chat(
            at_s + 0.21 * i + 0.03 * client,
            min(400, round(20 * rng.paretovariate(1.1))),
            prompt_tokens=rng.choice([10, 100, 400]),
            deadline_ms=rng.choice([1500.0, 4000.0, 20_000.0]),
            tenant=f"t{client}",
            on_deadline=rng.choice([OnDeadline.ERROR, OnDeadline.PARTIAL]),
            priority=Priority.BATCH if client == 4 else Priority.INTERACTIVE,
        )
        for i in range(40)
        for client in range(5)
    ]
    arrivals.sort(key=lambda arrival: arrival.at_s)
    run = simulate(arrivals, WIDE, {}, seed=SEED)
    assert not [result for result in run.results if result.outcome is Outcome.REFUSED]
    assert {result.pauses for result in run.results} == {0}
    for result in run.results:
        assert result.dispatched_s - result.arrival.at_s < 0.001
    plain = simulate(arrivals, WIDE, dict(UNPREDICTED.settings), seed=SEED)
    assert sum(f.met for f in run.results) >= sum(f.met for f in plain.results)


@pytest.mark.slow
def test_below_capacity_nothing_open_is_refused_or_held() -> None:
    scenario = replace(SCENARIO, open_share=1.0)
    for load in (0.2, 0.4):
        run = run_policy(OURS, scenario, FLEET, load * CAPACITY, 8.0, SEED)
        plain = run_policy(UNPREDICTED, scenario, FLEET, load * CAPACITY, 8.0, SEED)
        assert not [result for result in run.results if result.outcome is Outcome.REFUSED]
        ours, theirs = Summary.of(run, 0.0), Summary.of(plain, 0.0)
        assert ours.attainment >= theirs.attainment
        assert ours.ttft_p50_ms <= 1.05 * theirs.ttft_p50_ms


@pytest.mark.slow
@pytest.mark.parametrize(("load", "seeds"), [(1.0, 2), (2.0, 1)])
def test_dl15_a_fresh_service_is_never_worse_than_without_prediction(
    load: float, seeds: int
) -> None:
    """The first 8 s: nothing is known of pace and lengths. Two in a hundred are chance."""
    scenario = replace(SCENARIO, open_share=1.0)
    ours, plain = (
        sum(
            result.met
            for seed in range(1, seeds + 1)
            for result in run_policy(p, scenario, FLEET, load * CAPACITY, 8.0, seed).results
        )
        for p in (OURS, UNPREDICTED)
    )
    assert ours >= 0.98 * plain


# ── work conservation ────────────────────────────────────────────────────────────────────────────


def idle_while_waiting(
    arrivals: list[SimArrival], fleet: Fleet, settings: dict[str, str]
) -> SimRun:
    """Runs them, and asserts that no slot stayed free for longer than 10 ms while one waited."""
    since: dict[str, float] = {}

    def look(orchestrator: Orchestrator, now: float) -> None:
        if not any(i.ready and i.load < i.concurrency.slots for i in orchestrator.registry):
            since.clear()
            return
        waiting = [task for task in orchestrator.queue.tasks() if not task.paused_on]
        startable = {
            t.id for t in waiting if t.deadline.left_ms(now) > 1000 * fleet.spec.min_start_s
        }
        for name in [name for name in since if name not in startable]:
            del since[name]
        for name in startable:
            assert now - since.setdefault(name, now) <= 0.010

    return simulate(arrivals, fleet, settings, seed=SEED, watch=look)


@pytest.mark.slow
@settings(max_examples=3, deadline=None)
@given(
    load=st.sampled_from([0.3, 0.9, 1.5, 3.0]),
    seed=st.integers(0, 2**20),
    open_share=st.sampled_from([0.0, 0.5, 1.0]),
    patience=st.sampled_from([(0.3, 1.0), (1.5, 3.0, 6.0), (20.0,)]),
    batch=st.sampled_from([0.0, 0.3]),
    tenants=st.sampled_from([{"a": 1.0}, {"a": 5.0, "b": 1.0}]),
)
def test_dl15_no_slot_idles_while_somebody_waits(
    load: float,
    seed: int,
    open_share: float,
    patience: tuple[float, ...],
    batch: float,
    tenants: dict[str, float],
) -> None:
    """DL-10 too: everyone has one outcome, and nothing is left anywhere."""
    scenario = replace(
        SCENARIO, open_share=open_share, patience=patience, batch_share=batch, tenants=tenants
    )
    arrivals = list(scenario.arrivals(42.0 * load, 4.0, seed))
    run = idle_while_waiting(arrivals, FLEET, {"QUEUE__MAX_WAITING": "-1"})
    assert {result.endings for result in run.results} <= {1}
    orchestrator = run.orchestrator
    orchestrator.queue.check_integrity()
    assert not orchestrator.queue and not orchestrator.live_tasks
    for instance in orchestrator.registry:
        instance.concurrency.check_integrity()
        assert instance.concurrency.paused == instance.load == 0
    for worker in run.workers:
        assert worker.stats().kv_blocks_used == 0
