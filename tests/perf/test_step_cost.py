"""The table of what a step costs: every part has its time, and all that was begun is ended."""

import pytest

from perf.engine.step_cost import NoResponder, beside_arithmetic, measure, per_row
from perf.engine.stopwatch import Stopwatch
from perf.service.step import costs_of
from tests.worker.service.conftest import byte_tokenizer
from worker.engine.engine import Engine, EngineConfig
from worker.runner.synthetic import FreeRunner
from worker.scheduler.block_pool import BlockPool
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.text import Tokenizer


def test_parts_of_a_step_are_told_apart() -> None:
    """PF-1: what is the model's own does not count for the worker."""
    config = SchedulerConfig(
        vocab_size=256,
        context_tokens=1024,
        block_tokens=16,
        max_running=4,
        max_waiting=4,
        max_step_tokens=64,
        min_start_budget_s=0.0,
        prefix_cache=True,
    )
    engine = Engine(Scheduler(config, BlockPool(4 * 64)), FreeRunner([65, 66], 1), EngineConfig())
    tokenizer = Tokenizer(byte_tokenizer(), {}, "")
    costs = [measure(engine, tokenizer.stream, rows, samples=2) for rows in (1, 4)]
    engine.scheduler.check_integrity()
    assert not engine.scheduler.has_work
    for cost in costs:
        assert {"schedule", "tokens out", "frame", "made-up tokens"} <= set(cost.parts)
        own = beside_arithmetic(cost)
        assert len(own) == len(cost.cpu) == len(cost.yardstick) == 2
        assert all(us < sum(times[i] for times in cost.parts.values()) for i, us in enumerate(own))
    assert len(per_row(costs, beside_arithmetic)) == 2


@pytest.mark.slow
def test_the_torch_engines_parts_are_timed_on_a_machine_without_a_gpu() -> None:
    few, more = costs_of("torch", (1, 2), samples=1)
    for cost in (few, more):
        assert {"tensors in", "forward", "sample", "results"} <= set(cost.parts)
        assert 0 < beside_arithmetic(cost)[0] < sum(times[0] for times in cost.parts.values())


def test_a_stopwatch_leaves_what_it_timed_as_it_was() -> None:
    responder, watch = NoResponder(), Stopwatch()
    before = dict(vars(responder))
    watch.wrap(responder, "is_cancelled", "asking")
    assert not responder.is_cancelled()
    assert set(watch.take()) == {"asking"}
    watch.unwrap()
    assert vars(responder) == before and not responder.is_cancelled()
