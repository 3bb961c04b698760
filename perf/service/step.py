"""Cost of a step for a worker beside its arithmetic, by part, for 1 to 256 rows.

First on one thread without Triton (``perf.engine.step_cost``): the engine that makes its tokens up,
and the demo model on the CPU. Then the whole of a worker's process behind a real Triton: one lane,
all rows on it, a step of 10 ms; that adds the two threads, their wake-ups, the interpreter's lock
between them, and Triton's sender and its ``is_cancelled``.

The gate is a ratio: what a row costs, and what a step does, in turns of a plain Python loop that is
timed between the samples.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from perf.engine.step_cost import (
    ROWS,
    StepCost,
    beside_arithmetic,
    measure,
    per_row,
)
from perf.load.cpu import process_cpu_s
from perf.load.lane import open_lane
from perf.report.bundle import Figure
from perf.stack.context import Bench, Context
from perf.stack.stack import StackSpec
from worker.engine.build import build_engine
from worker.engine.engine import Engine
from worker.runner.synthetic import CYCLE_WORDS, FreeRunner
from worker.settings import EngineName, WorkerSettings

_DEMO = Path(__file__).parents[2] / "worker" / "demo_model" / "checkpoint"
_QUICK_ROWS = (1, 64)
_STEP_MS = 10.0
_WARM_S, _WINDOW_S, _WINDOWS = 0.5, 0.5, 3
_TURNS = 64


async def run(context: Context) -> list[Figure]:
    rows, samples = (_QUICK_ROWS, 7) if context.quick else (ROWS, 9)
    made_up = await asyncio.to_thread(costs_of, "synthetic-free", rows, samples)
    figures = [*_gates(made_up), *_figures("synthetic", made_up)]
    if not context.quick:
        figures += _figures("demo", await asyncio.to_thread(costs_of, "torch", rows, samples))
    return figures


def costs_of(engine_name: EngineName, rows: Sequence[int], samples: int) -> list[StepCost]:
    """Step costs of an engine with the demo model on the CPU, one for each number of rows."""
    settings = WorkerSettings(
        model_path=_DEMO,
        device="cpu",
        engine=engine_name,
        max_running=max(rows),
        max_step_tokens=2 * max(rows),
    )
    loaded = build_engine(settings)
    engine = loaded.engine
    assert isinstance(engine, Engine)
    if engine_name != "torch":
        words = loaded.tokenizer.plain_words(CYCLE_WORDS)
        engine.executor.runner = FreeRunner(words, tokens_per_step=1)
    try:
        return [measure(engine, loaded.tokenizer.stream, count, samples) for count in rows]
    finally:
        engine.stop()


def _gates(costs: list[StepCost]) -> list[Figure]:
    few, many = min(costs, key=_rows_of), max(costs, key=_rows_of)
    each = zip(per_row(costs, lambda cost: cost.cpu), many.yardstick, strict=True)
    alone = zip(few.cpu, few.yardstick, strict=True)
    of = Figure.of
    return [
        of(
            "step.row_ratio",
            "one row of a step ÷ one turn of a plain loop",
            "",
            [us / turn_us for us, turn_us in each],
            tolerance=1.8,
        ),
        of(
            "step.step_ratio",
            f"step of one row ÷ {_TURNS} turns of a plain loop",
            "",
            [us / turn_us / _TURNS for us, turn_us in alone],
            tolerance=2.0,
        ),
    ]


def _rows_of(cost: StepCost) -> int:
    return cost.rows


def _figures(engine: str, costs: list[StepCost]) -> list[Figure]:
    of = Figure.of
    figures = [
        of(
            f"step.{engine}.own.per_row_us",
            f"{engine}: one row more, its own",
            "µs",
            per_row(costs, beside_arithmetic),
        ),
    ]
    for cost in costs:
        at = f"step.{engine}.r{cost.rows}"
        rows = f"{cost.rows} row{'s' if cost.rows > 1 else ''}"
        figures += [
            of(f"{at}.cpu_us", f"{engine}, {rows}: all, CPU", "µs/step", cost.cpu),
            of(
                f"{at}.own_us",
                f"{engine}, {rows}: beside the arithmetic",
                "µs/step",
                beside_arithmetic(cost),
            ),
            *(
                of(f"{at}.{part}", f"    {part}", "µs/step", times)
                for part, times in cost.parts.items()
            ),
        ]
    return figures


async def run_behind_triton(context: Context) -> list[Figure]:
    spec = StackSpec(
        "synthetic-paced", device=context.device, step_ms=_STEP_MS, max_running=max(ROWS)
    )
    stack = await context.stack(spec)
    worker = stack.pids()["worker"]
    figures = []
    steps = round((_WARM_S + (_WINDOWS + 2) * _WINDOW_S) * 1e3 / _STEP_MS)
    async with open_lane(stack.grpc_address) as lane:
        for rows in ROWS:
            jobs = [lane.submit(10 * steps) for _ in range(rows)]
            await asyncio.gather(*(job.first_token for job in jobs))
            await asyncio.sleep(_WARM_S)
            per_step = []
            for _ in range(_WINDOWS):
                cpu, tokens = process_cpu_s(worker), sum(job.token_count for job in jobs)
                await asyncio.sleep(_WINDOW_S)
                cpu = process_cpu_s(worker) - cpu
                tokens = sum(job.token_count for job in jobs) - tokens
                per_step.append(cpu * 1e6 * rows / tokens)
            for job in jobs:
                lane.cancel(job)
            await asyncio.gather(*(job.ended for job in jobs))
            name = f"{rows} row{'s' if rows > 1 else ''}: worker CPU"
            figures += [
                Figure.of(f"step_triton.r{rows}.step_us", name, "µs/step", per_step),
                Figure.of(
                    f"step_triton.r{rows}.token_us",
                    name,
                    "µs/token",
                    [us / rows for us in per_step],
                ),
            ]
    return figures


BENCH = Bench("step", "what a step costs beside its arithmetic, by part", run, limit_s=200)
TRITON = Bench(
    "step-triton",
    f"the same behind Triton, as a whole: one lane, steps of {_STEP_MS:g} ms",
    run_behind_triton,
    limit_s=90,
    in_quick=False,
)
