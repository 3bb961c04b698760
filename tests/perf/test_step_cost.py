"""What a step costs: each sample has its time, and all that was begun is ended."""

from perf.service.step import measure
from tests.worker.service.conftest import byte_tokenizer
from worker.engine.engine import Engine, EngineConfig
from worker.runner.synthetic import FreeRunner
from worker.scheduler.block_pool import BlockPool
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.text import Tokenizer


def test_every_sample_is_timed_and_nothing_is_left() -> None:
    """PF-1."""
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
        assert len(cost.cpu) == len(cost.yardstick) == 2
        assert min(*cost.cpu, *cost.yardstick) > 0
