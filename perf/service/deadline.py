"""Cost of the deadline and abort checks, per request and step (DL-4, DL-13).

It uses the engine as a library, without Triton: 64 running jobs, stepped on this thread. The figure
is the engine's own sampled metric, also published in production, read after each series of steps.
It also measures the whole step of the synthetic engine, to show the share.
"""

import asyncio
import math
import time

from perf.report.bundle import Figure
from perf.stack.context import Bench, BenchContext
from protocol import Sampling
from worker.core import Job
from worker.engine.engine import Engine, EngineConfig
from worker.runner.synthetic import FreeRunner
from worker.scheduler.block_pool import BlockPool
from worker.scheduler.config import SchedulerConfig
from worker.scheduler.scheduler import Scheduler

JOBS = 64
_CONTEXT = 100_000
_BLOCK_TOKENS = 16
_STEPS_PER_SAMPLE = 256


async def run(context: BenchContext) -> list[Figure]:
    return await asyncio.to_thread(_measure, 10 if context.quick else 60)


def _measure(samples: int) -> list[Figure]:
    engine = _busy_engine()
    checks, steps = [], []
    for _ in range(_STEPS_PER_SAMPLE):
        engine.step()
    for _ in range(samples):
        begun = time.perf_counter()
        for _ in range(_STEPS_PER_SAMPLE):
            engine.step()
        steps.append((time.perf_counter() - begun) * 1e6 / _STEPS_PER_SAMPLE / JOBS)
        checks.append(engine.stats().check_us)
    if engine.stats().running != JOBS:
        raise RuntimeError(f"{JOBS} jobs were to run, {engine.stats().running} do")
    engine.stop()
    of = Figure.of
    return [
        of("deadline.check_us", "look at deadline and abort", "µs/request", checks),
        of("deadline.step_us", "whole synthetic step", "µs/request", steps),
    ]


def _busy_engine() -> Engine:
    """An engine whose jobs outlast the measurement."""
    config = SchedulerConfig(
        vocab_size=1000,
        context_tokens=_CONTEXT,
        block_tokens=_BLOCK_TOKENS,
        max_running=JOBS,
        max_waiting=0,
        max_step_tokens=1024,
        min_start_budget_s=0.0,
        tile_tokens=1,
    )
    pool = BlockPool(JOBS * math.ceil(_CONTEXT / _BLOCK_TOKENS))
    runner = FreeRunner([5, 6, 7], tokens_per_step=1)
    engine = Engine(Scheduler(config, pool), runner, EngineConfig())
    sampling = Sampling(max_tokens=_CONTEXT - 8, temperature=0.0, ignore_eos=True)
    for _ in range(JOBS):
        engine.submit(Job([1, 2, 3], sampling, deadline=time.monotonic() + 3600))
    return engine


BENCH = Bench("deadline", "cost of the deadline check, 64 running requests", run, limit_s=30)
