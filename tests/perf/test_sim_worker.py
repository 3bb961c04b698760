"""The real worker on virtual time: what its steps take, and what is late."""

from dataclasses import replace

import pytest

from orchestrator.tasks.task import Priority
from perf.sim.arrivals import SimArrival
from perf.sim.replay.worker import WorkerSpec
from perf.sim.simulate import Fleet, SimRun, simulate
from protocol import Outcome
from worker.runner.synthetic import StepCost

FLEET = Fleet(WorkerSpec(StepCost(10e-3, 0.0, 0.1e-3), 2, kv_tokens=1600, noise=0.0), count=1)
"""Ten milliseconds a step, a tenth for each token of a prompt; a message takes one."""


def run(length: int, deadline_ms: float) -> SimRun:
    """Of one request of ten prompt tokens."""
    lone = SimArrival(1.0, 10, length, length, deadline_ms, "", Priority.INTERACTIVE)
    return simulate([lone], FLEET, {"admission__mode": "off"}, seed=1)


def test_steps_overlap_as_on_a_gpu_where_launches_take_time() -> None:
    """An H100's shape: a prompt is launched for longer than it is computed; decodes are not."""
    cost = StepCost(7e-3, prompt_step_s=8e-3, launch_s=1e-3, prompt_launch_s=29e-3)
    fleet = Fleet(replace(FLEET.spec, cost=cost), count=1)
    done = simulate(
        [SimArrival(1.0, 10, 30, 30, 10_000.0, "", Priority.INTERACTIVE)],
        fleet,
        {"admission__mode": "off"},
        seed=1,
    )
    (result,) = done.results
    # A step is read when the next one has been launched.
    assert result.first_s - result.dispatched_s == pytest.approx(0.001 + 0.029 + 0.001)
    assert result.ended_s - result.first_s == pytest.approx(29 * 0.007, abs=0.002)
    (worker,) = done.workers
    stats = worker.stats()
    assert (stats.prompt_steps_total, stats.prompt_busy_ms_total) == (1, pytest.approx(29.0))
    decodes = stats.steps_total - 1
    assert stats.busy_ms_total - 29.0 == pytest.approx(7.0 * decodes) and decodes in (29, 30)


def test_a_token_after_the_deadline_is_late() -> None:
    """The step in which the deadline passes is computed in vain."""
    done = run(100, 300.0)
    (result,) = done.results
    assert result.outcome is Outcome.MISSED
    assert result.ended_s - result.arrival.at_s == pytest.approx(0.3, abs=0.012)
    (worker,) = done.workers
    assert worker.tokens_late == 1
    assert worker.stats().kv_blocks_used == 0
