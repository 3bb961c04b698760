"""DL-7, WK-13: what steps take is measured at load, for forecasts that cannot wait for a crowd."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protocol import StepCosts
from tests.support.cases import for_each
from worker.engine.build import build_engine
from worker.engine.step_costs import FIXED_SHARE, _fixed_share, fitting, largest, measure
from worker.errors import BrokenCheckpoint
from worker.kv_disk.base import HostMemory
from worker.kv_disk.block_file import BlockFormat
from worker.runner.base import BuiltRunner
from worker.runner.synthetic import PacedRunner, StepCost
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.plan import Plan, StepResult
from worker.settings import WorkerSettings


class Bent(PacedRunner):
    """Steps of 1 ms, of 5 ms from three rows on, and 10 µs a token of a prompt, ``context_s`` each
    token of a context; by its own clock, every third step is disturbed."""

    def __init__(self, context_s: float = 0.0) -> None:
        self.now, self.steps, self.context_s = 0.0, 0, context_s
        super().__init__([7], StepCost(1e-3), clock=lambda: self.now)

    def execute(self, plan: Plan) -> StepResult:
        self.steps += 1
        result = StepResult([[7]] * len(plan.rows))
        prompt = plan.tokens - plan.decodes
        self.now += (5e-3 if len(plan.rows) > 2 else 1e-3) + 1e-5 * prompt
        self.now += self.context_s * sum(row.start for row in plan.rows[: plan.decodes])
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
    tile_tokens=1,
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


def test_wk12_a_model_that_computes_no_finite_numbers_is_not_loaded() -> None:
    class Broken(Bent):
        def execute(self, plan: Plan) -> StepResult:
            return StepResult([[] for _ in plan.rows], not_finite=[0])

    with pytest.raises(BrokenCheckpoint, match="models verify"):
        measure(Broken(), CONFIG, blocks=100)


def test_a_pool_without_room_for_all_rows_is_measured_too() -> None:
    """Those that still wait must not come into the steps of prompts, which are of one row."""

    class Looking(Bent):
        def execute(self, plan: Plan) -> StepResult:
            assert all(row.count == 1 for row in plan.rows[: plan.decodes])
            assert sum(row.count > 1 for row in plan.rows) in (0, len(plan.rows))
            return super().execute(plan)

    assert measure(Looking(), CONFIG, blocks=9) is not None


class Cleared(HostMemory):
    """Memory that knows which of its blocks were written."""

    def __init__(self) -> None:
        data = np.empty((1, 100, 64), np.uint8)
        super().__init__(data, BlockFormat("U8", (1, 64), 64))
        self.blocks: set[int] = set()

    def clear(self, blocks: Sequence[int]) -> None:
        self.blocks |= set(blocks)


def test_contexts_are_measured_in_memory_that_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody wrote to is one page of zeros, which is read in no time."""
    runner, memory = Bent(context_s=1e-5), Cleared()
    monkeypatch.setattr("worker.engine.step_costs.perf_counter", lambda: runner.now)
    found = measure(runner, CONFIG, 100, memory)
    assert found is not None and found.context_token_ms == pytest.approx(0.01, rel=0.05)
    assert len(memory.blocks) >= 6 * 16, "all that six rows of 256 tokens hold"


@pytest.mark.parametrize(("share", "doubt"), [(2.0, 0.0), (0.2, 1.61)])
def test_what_was_measured_without_a_processor_is_doubted(
    share: float, doubt: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = Bent()
    monkeypatch.setattr("worker.engine.step_costs.perf_counter", lambda: runner.now)
    monkeypatch.setattr("worker.engine.step_costs.process_time", lambda: share * runner.now)
    costs = measure(runner, CONFIG, blocks=100, on_cpu=True)
    assert costs is not None and costs.doubt == pytest.approx(doubt, abs=0.01)


def test_a_slow_machine_measures_each_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its start would take half a minute otherwise."""
    runner = Bent()
    monkeypatch.setattr("worker.engine.step_costs.perf_counter", lambda: runner.now)
    monkeypatch.setattr("worker.engine.step_costs.BUDGET_S", 0.0)
    costs = measure(runner, CONFIG, blocks=200)
    assert costs is not None and runner.steps == 1 + len(costs.rows) + 2


def test_a_pool_for_one_request_shows_nothing_of_more() -> None:
    assert measure(Bent(), CONFIG, blocks=3) is None


# ── sizes on CUDA (WK-13) ────────────────────────────────────────────────────────────────────

ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
H100 = StepCosts(ROWS, (7.0, 7.0, 7.1, 7.1, 7.2, 7.5, 8.0, 9.0, 11.0), 0.04, 6.0, 0.023)
"""An 8B model as measured there: decodes nearly free, a chunk of a prompt costs 6 ms more."""
SMALL = StepCosts(ROWS, (7.0, 7.0, 7.0, 7.0, 8.0, 10.0, 20.0, 40.0, 80.0), 0.2, 1.0, 0.2)
"""Steps get slower with each row from 32 on, and a prompt costs next to nothing at first."""


def settings(**values: Any) -> WorkerSettings:
    return WorkerSettings(model_path=Path("m"), **{"engine": "torch", "device": "cuda"} | values)


def chosen(costs: StepCosts, blocks: int = 30_000, **stated: Any) -> tuple[int, int]:
    asked = settings(**stated)
    built = largest(asked)
    config = replace(CONFIG, max_running=built.max_running, max_step_tokens=built.max_step_tokens)
    found = fitting(asked, config, costs, blocks)
    return found.max_running, found.max_step_tokens


def test_a_gpu_gets_the_rows_and_tokens_that_its_steps_are_worth() -> None:
    assert chosen(H100) == (256, 4096)
    assert [_fixed_share(H100, n) <= FIXED_SHARE for n in (2048, 4096)] == [False, True]
    assert chosen(SMALL) == (32, 512)
    assert chosen(H100, blocks=2_560)[0] == 80, "no more than have 512 tokens each"


def test_an_engine_on_a_gpu_runs_the_sizes_that_were_fitted_and_says_so(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is built for the largest, which are measured."""
    built_for: list[WorkerSettings] = []

    def runner(given: WorkerSettings, *_: object) -> BuiltRunner:
        built_for.append(given)
        return BuiltRunner(Bent(), 30_000, "cuda", "bfloat16")

    monkeypatch.setattr("worker.runner.build.build_torch_runner", runner)
    monkeypatch.setattr("worker.engine.build.measure", lambda *_, **__: SMALL)
    caplog.set_level("INFO")
    asked = settings().model_copy(update={"model_path": tiny})
    card = build_engine(asked, measures=True).card
    assert (built_for[0].max_running, built_for[0].max_step_tokens) == (256, 4096)
    assert (card.max_running, card.max_step_tokens, card.step_costs) == (32, 512, SMALL.up_to(32))
    assert "a step carries up to 32 rows and 512 tokens" in caplog.text


def test_what_the_operator_states_is_not_changed() -> None:
    assert chosen(H100, max_running=64, max_step_tokens=512) == (64, 512)
    assert chosen(H100, max_running=16)[1] == 4096
    assert chosen(H100.up_to(128), max_step_tokens=128) == (128, 128), "a row needs a token"


@for_each("other", [{"device": "cpu"}, {"engine": "vllm"}])
def test_elsewhere_the_settings_hold(other: dict[str, str]) -> None:
    asked = settings(**other)
    assert largest(asked) == asked
    assert fitting(asked, CONFIG, H100, 9) == CONFIG
