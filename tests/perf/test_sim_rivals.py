"""Others' schedulers on tiny cases made by hand, and what none of them may exceed."""

import math

import pytest

from orchestrator.tasks.job import Priority
from perf.sim.arrivals import SimArrival
from perf.sim.replay.worker import WorkerSpec
from perf.sim.rivals.fleet import EngineFigures, Job, RivalFleet
from perf.sim.rivals.policies import RIVALS, JitServe, QoServe, SlosServe
from tests.support.cases import for_each
from worker.runner.synthetic import StepCost

STEP_COST = StepCost(10e-3, 0.0, 0.1e-3)
MACHINE = EngineFigures(2, 0.1e-3, 10e-3)
"""Two slots, ten milliseconds a token."""


def arrival(at_s: float = 0.0, prompt: int = 10, length: int = 10, **changes: object) -> SimArrival:
    values: dict[str, object] = {
        "max_tokens": 200,
        "deadline_ms": 10_000.0,
        "tenant": "",
        "priority": Priority.INTERACTIVE,
    }
    return SimArrival(at_s, prompt, length=length, **(values | changes))  # type: ignore[arg-type]


def job(due_s: float, *, prompt: int = 0, made: int = 0, at_s: float = 0.0) -> Job:
    made_of = arrival(at_s, max(1, prompt), deadline_ms=1000 * (due_s - at_s))
    found = Job(made_of, due_s, math.inf, math.inf, computed=max(1, prompt) - prompt, made=made)
    return found


def taught(policy: object, tokens: int, count: int = 40) -> None:
    """Answers of that length have ended."""
    for _ in range(count):
        ended = job(10.0, made=tokens)
        ended.arrival = arrival(length=tokens)
        policy.answered(ended)  # type: ignore[attr-defined]


def test_jitserve_takes_what_is_shortest_and_can_be_in_time() -> None:
    policy = JitServe(MACHINE)
    taught(policy, 50)
    long, short, lost = job(9.0, prompt=5000), job(9.0, prompt=10), job(0.1, prompt=1)
    assert policy.pick(0.0, [], [long, lost, short], 0) == [short, long, lost]
    running = [job(9.0, prompt=2000), job(9.0, prompt=3000)]
    for _ in range(29):  # it keeps to its plan between two rounds
        assert policy.pick(0.0, running, [short], 0) == running
    assert policy.pick(0.0, running, [short], 0) == running
    assert policy.pick(0.0, running, [short], 0)[0] is short  # the 32nd step: it may pause them


def test_qoserve_relegates_once_what_will_miss_and_serves_it_last() -> None:
    policy = QoServe(MACHINE)
    taught(policy, 50)
    late, tight, loose = job(0.2), job(1.0), job(3.0)
    assert policy.pick(0.0, [], [late, loose, tight], 0) == [tight, loose, late]
    assert (late.is_relegated, tight.is_relegated) == (True, False)
    # A long prompt counts in addition to the deadline.
    long = job(2.9, prompt=2000)
    assert policy.pick(0.0, [], [long, loose], 0) == [loose, long]


def test_slos_serve_keeps_as_many_deadlines_as_fit() -> None:
    policy = SlosServe(EngineFigures(1, 0.1e-3, 10e-3))
    taught(policy, 50)  # half a second each
    jobs = [job(0.6), job(1.1), job(1.2), job(0.3)]
    picked = policy.pick(0.0, [], jobs, 0)
    assert set(picked[:2]) < set(jobs[:3])
    assert jobs[3] in picked[2:]  # no way, but it gets what is left
    # One long job makes way for two short ones.
    long, one, two = job(1.1, prompt=5000), job(1.15), job(1.2)
    assert set(policy.pick(0.0, [], [long, one, two], 1)[:2]) == {one, two}


@for_each("name", RIVALS)
def test_one_request_takes_what_the_worker_takes(name: str) -> None:
    spec = WorkerSpec(STEP_COST, 2, kv_tokens=1000, noise=0.0)
    fleet = RivalFleet(spec, 1, RIVALS[name][1](MACHINE), seed=1)
    (done,) = fleet.run([arrival(prompt=10, length=10)])
    assert done.met and done.made == 10
    assert done.first_at == pytest.approx(0.011)
    assert done.ended_at == pytest.approx(0.011 + 9 * 0.010)
