"""Steps are billed their own launch and device time, with overlap too (WK-15). Virtual time.

The shape is an H100's: a decode is a recorded graph, launched in 1 ms and computed in 7; a step
with a prompt is launched kernel by kernel for 29 ms, and computed in 15.
"""

import pytest

from protocol import Sampling
from tests.support.cases import for_each
from tests.support.engine import EOS, FakeClock, config
from worker.core import Job
from worker.engine.engine import Engine, EngineConfig
from worker.engine.executor import Executor
from worker.runner.out_of_memory import StepMemory
from worker.runner.synthetic import PacedRunner, PacedStep, StepCost
from worker.scheduler.block_pool import BlockPool
from worker.scheduler.plan import Plan
from worker.scheduler.scheduler import Scheduler

H100 = StepCost(0.007, prompt_step_s=0.008, launch_s=0.001, prompt_launch_s=0.029)
COMPUTED = StepCost(0.007, prompt_step_s=0.008, launch_s=0.001, prompt_launch_s=0.002)
"""A device that takes longer for each step than the host."""


def overlapped(cost: StepCost, clock: FakeClock) -> PacedRunner:
    def sleep(seconds: float) -> None:
        clock.now += seconds

    return PacedRunner([7], cost, clock=clock, sleep=sleep)


def told_s(
    cost: StepCost,
    clock: FakeClock,
    kinds: str,
    *,
    pause_s: float = 0.0,
    waited_s: float = 0.0,
    has_clock: bool = True,
) -> list[float]:
    """What the executor says that steps of these kinds took; ``pause_s`` passes between them. A
    launch waits ``waited_s`` for the step before. The device may have no clock of its own."""
    runner = overlapped(cost, clock)
    launch = runner.launch

    def launched(plan: Plan) -> PacedStep:
        clock.now += waited_s
        step = launch(plan)
        device = step._result.device
        assert device is not None
        step._result.device = device._replace(waited_s=waited_s) if has_clock else None
        return step

    runner.launch = launched  # type: ignore[method-assign]
    scheduler = Scheduler(config(), BlockPool(1))
    executor = Executor(scheduler, runner, StepMemory(), clock, overlap=True)
    told = []
    for kind in [*kinds, ""]:
        done = executor.run(Plan([], 0, 100 * (kind == "P")) if kind else None)
        if done is not None and done.plan is not None:
            told.append(done.duration_s)
        clock.now += pause_s
    return told


@for_each("kinds", ["DDDDPDDDDPDDDDPDDDD", "PPPP", "DPDPDP", "P", "DP", "PD"])
@for_each(("cost", "prompt_s"), [(H100, 0.029), (COMPUTED, 0.015)])
@for_each("pause_s", [0.0, 0.001, 1.0])
def test_each_step_is_billed_its_own_time(
    cost: StepCost, prompt_s: float, kinds: str, pause_s: float
) -> None:
    """Whatever comes before and after it, and whether the device was idle between two steps."""

    expected = [prompt_s if kind == "P" else 0.007 for kind in kinds]
    assert told_s(cost, FakeClock(), kinds, pause_s=pause_s) == pytest.approx(expected)


def test_a_launch_that_waits_for_the_step_before_is_not_billed_for_that() -> None:
    """As where masks of a grammar are made of its tokens."""
    assert told_s(COMPUTED, FakeClock(), "DD", waited_s=0.05) == pytest.approx([0.007] * 2)


def test_without_a_clock_of_the_device_no_time_is_counted_twice() -> None:
    """The host's own time, in the launch and in waiting for it."""
    clock = FakeClock()
    assert sum(told_s(H100, clock, "DDPDDDPPD", has_clock=False)) == pytest.approx(clock.now)


def test_estimates_and_use_of_the_device_follow_the_true_times() -> None:
    """What a prompt adds to a step, and LB-7."""
    clock = FakeClock()
    limits = config(max_running=8, max_step_tokens=200, context_tokens=1024, prefix_cache=False)
    engine = Engine(
        Scheduler(limits, BlockPool(1024)),
        overlapped(H100, clock),
        EngineConfig([EOS], overlap=True),
        clock=clock,
    )
    for _ in range(6):
        engine.submit(Job([9] * 100, Sampling(max_tokens=200, ignore_eos=True), 1e6))
        for _step in range(20):
            engine.step()
    times = engine.scheduler.step_time
    assert times.plain_step_s == pytest.approx(0.007)
    assert times.prompt_token_s == pytest.approx((0.029 - 0.007) / 100)
    stats = engine.stats()
    assert 0.5 < stats.stream_utilization <= 1
    assert (stats.prompt_steps_total, stats.prompt_busy_ms_total) == (6, pytest.approx(6 * 29.0))
    clock.now += 3600
    while engine.scheduler.has_work:
        engine.step()
    assert times.plain_step_s == pytest.approx(0.007), "an hour of nothing is no step"
