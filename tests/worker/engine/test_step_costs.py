"""DL-7, WK-13: what steps take is measured at load, for forecasts that cannot wait for a crowd."""

import pytest

from worker.engine.step_costs import measure
from worker.runner.synthetic import PacedRunner, StepCost
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.plan import Plan, StepResult


class Bent(PacedRunner):
    """Steps of 1 ms, of 5 ms from three rows on, and 10 µs a token of a prompt; by its own clock,
    every third step is disturbed."""

    def __init__(self) -> None:
        self.now, self.steps = 0.0, 0
        super().__init__([7], StepCost(1e-3), clock=lambda: self.now)

    def execute(self, plan: Plan) -> StepResult:
        self.steps += 1
        result = StepResult([[7]] * len(plan.rows))
        prompt = plan.tokens - plan.decodes
        self.now += (5e-3 if len(plan.rows) > 2 else 1e-3) + 1e-5 * prompt
        self.now += 20e-3 * (self.steps % 3 == 0)
        return result


CONFIG = SchedulerConfig(
    vocab_size=100,
    context_tokens=256,
    block_tokens=16,
    max_running=6,
    max_waiting=4,
    max_step_tokens=128,
    min_start_budget_s=0.0,
    prefix_cache=True,
)


def test_each_size_is_measured_and_disturbances_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runner = Bent()
    monkeypatch.setattr("worker.engine.step_costs.perf_counter", lambda: runner.now)
    found = measure(runner, CONFIG, blocks=100)
    assert found is not None
    assert found.rows == (1, 2, 4, 6)
    assert found.step_ms == pytest.approx((1.0, 1.0, 5.0, 5.0))
    assert found.prompt_token_ms == pytest.approx(0.01, rel=0.2)


def test_a_slow_machine_measures_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start would take half a minute otherwise."""
    runner = Bent()
    monkeypatch.setattr("worker.engine.step_costs.perf_counter", lambda: runner.now)
    monkeypatch.setattr("worker.engine.step_costs.BUDGET_S", 0.0)
    costs = measure(runner, CONFIG, blocks=200)
    assert costs is not None and runner.steps == 1 + len(costs.rows) + 2


def test_a_pool_for_one_request_shows_nothing_of_more() -> None:
    assert measure(Bent(), CONFIG, blocks=3) is None
