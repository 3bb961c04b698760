"""Cost of a step for a worker: engine, emitter and lane as a worker has them, for 1 and 64 rows.

Stepped on one thread with a lane that leads nowhere, without Triton; the engine makes its tokens
up. The gate is a ratio: what a row costs, and what a step does, in turns of a plain Python loop
that is timed between the samples.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic, thread_time_ns
from typing import Any, Final

from catalog.paths import DEMO_CHECKPOINT
from perf.engine.runs import greedy
from perf.report.bundle import Figure
from perf.stack.context import Bench, Context
from protocol import AbortCause, Code
from worker.engine.build import build_engine
from worker.engine.engine import Engine
from worker.runner.synthetic import CYCLE_WORDS, FreeRunner
from worker.service.emitter import Emitter
from worker.service.lane import Lane, LaneJob
from worker.settings import WorkerSettings
from worker.text import TextStream

_FEW, _MANY = 1, 64
_SAMPLES: Final = 9
_BATCH: Final = 32
"""Steps of a sample: as many as take a block of KV or two, so that each holds the same work."""
_WARM_STEPS, _PROMPT, _TURNS = 8, 4, 64


@dataclass(slots=True)
class StepCost:
    """Microseconds of CPU per step, and of a turn of a plain Python loop just before, by sample."""

    cpu: list[float] = field(default_factory=list)
    yardstick: list[float] = field(default_factory=list)


class NoResponder:
    """Takes every response."""

    def send(self, tensors: Any, *, final: bool = False) -> None: ...

    def close(self) -> None: ...

    def fail(self, code: Code, message: str) -> None:
        raise RuntimeError(f"{code}: {message}")

    def is_cancelled(self) -> bool:
        return False


async def run(context: Context) -> list[Figure]:
    return await asyncio.to_thread(_figures)


def _figures() -> list[Figure]:
    settings = WorkerSettings(
        model_path=DEMO_CHECKPOINT,
        device="cpu",
        engine="synthetic-free",
        max_running=_MANY,
        max_step_tokens=2 * _MANY,
    )
    loaded = build_engine(settings)
    engine = loaded.engine
    assert isinstance(engine, Engine)
    words = loaded.tokenizer.plain_words(CYCLE_WORDS)
    engine.executor.runner = FreeRunner(words, tokens_per_step=1)
    try:
        few, many = (measure(engine, loaded.tokenizer.stream, n, _SAMPLES) for n in (_FEW, _MANY))
    finally:
        engine.stop()
    row = [(more - less) / (_MANY - _FEW) for less, more in zip(few.cpu, many.cpu, strict=True)]
    of = Figure.of
    return [
        of(
            "step.row_ratio",
            "one row of a step ÷ one turn of a plain loop",
            "",
            [us / turn for us, turn in zip(row, many.yardstick, strict=True)],
            tolerance=1.8,
        ),
        of(
            "step.step_ratio",
            f"step of one row ÷ {_TURNS} turns of a plain loop",
            "",
            [us / turn / _TURNS for us, turn in zip(few.cpu, few.yardstick, strict=True)],
            tolerance=2.0,
        ),
        of("step.row_us", "one row more, CPU", "µs", row),
        of("step.one_us", "a step of one row, CPU", "µs", few.cpu),
    ]


def measure(engine: Engine, streams: Callable[[], TextStream], rows: int, samples: int) -> StepCost:
    """Measure steps of an engine that is not started and has nothing to do; leaves it so."""
    emitter = Emitter(engine, heartbeat_s=1.0, clock=monotonic)
    lane = Lane("bench", NoResponder())
    emitter.open_lane(lane)
    steps = samples * _BATCH + 2 * _WARM_STEPS + rows  # a prompt may take a step of its own
    jobs = []
    for handle in range(rows):
        job = greedy([10 + handle % 100] * _PROMPT, steps)
        emitter.job_replies[job] = LaneJob(lane, handle, job, streams(), NoResponder())
        engine.submit(job)
        jobs.append(job)

    def step() -> None:
        emitter.sink(engine.step())
        emitter.cycle()

    while len(engine.scheduler.running) < rows or engine.scheduler.waiting:
        step()
    for _ in range(_WARM_STEPS):
        step()
    cost = StepCost()
    yardstick_us()  # the first one is slow
    for _ in range(samples):
        cost.yardstick.append(yardstick_us())
        begun = thread_time_ns()
        for _ in range(_BATCH):
            step()
        cost.cpu.append((thread_time_ns() - begun) / 1e3 / _BATCH)
    for job in jobs:
        engine.cancel(job, AbortCause.CANCEL)
    while engine.scheduler.has_work:
        step()
    return cost


def yardstick_us() -> float:
    """Microseconds of a turn of a loop that does what a step does for a row: attributes, calls,
    objects."""
    begun = thread_time_ns()
    known: dict[_Thing, list[int]] = {}
    for thing in _THINGS:
        if thing.is_due(1):
            known[thing] = [thing.number]
    return (thread_time_ns() - begun) / 1e3 / len(_THINGS)


class _Thing:
    def __init__(self, number: int) -> None:
        self.number = number

    def is_due(self, now: int) -> bool:
        return self.number + now > 0


_THINGS: Final = [_Thing(number) for number in range(4096)]
BENCH = Bench("step", "what a step costs a worker, over a plain loop", run, limit_s=60)
