"""CPU of a step beside its arithmetic, by part: engine, emitter and lane as a worker has them.

Stepped on one thread with a lane that leads nowhere, so that each part's time is its own. What
two threads, their wake-ups and Triton's senders add is measured whole (``perf.service`` ``step``).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import monotonic, thread_time_ns
from typing import Any, Final

from perf.engine.runs import greedy
from perf.engine.stopwatch import Stopwatch
from protocol import AbortCause, Code
from worker.engine.engine import Engine
from worker.service import lane as lane_module
from worker.service.emitter import Emitter
from worker.service.lane import Lane, LaneJob
from worker.text import TextStream

ROWS: Final = (1, 8, 32, 64, 256)
ARITHMETIC: Final = ("forward", "sample", "made-up tokens")
"""Parts that count for the model, not for the worker."""
_BATCH: Final = 32
"""Steps of a sample: as many as take a block of KV or two, so that each holds the same work."""
_WARM_STEPS: Final = 8
_PROMPT: Final = 4


@dataclass(slots=True)
class StepCost:
    """Microseconds per step, one entry per sample. ``cpu`` is the thread's, without stopwatch.

    ``yardstick`` is what a turn of a plain Python loop took just before each.
    """

    rows: int
    cpu: list[float] = field(default_factory=list)
    yardstick: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)


class NoResponder:
    """Takes every response, and counts their bytes."""

    def __init__(self) -> None:
        self.bytes = 0

    def send(self, tensors: Any, *, final: bool = False) -> None:
        self.bytes += sum(len(tensor[0]) for tensor in tensors.values())

    def close(self) -> None: ...

    def fail(self, code: Code, message: str) -> None:
        raise RuntimeError(f"{code}: {message}")

    def is_cancelled(self) -> bool:
        return False


def measure(engine: Engine, streams: Callable[[], TextStream], rows: int, samples: int) -> StepCost:
    """Measure steps of an engine that is not started and has nothing to do; leaves it so."""
    emitter = Emitter(engine, heartbeat_s=1.0, clock=monotonic)
    lane = Lane("bench", NoResponder())
    emitter.open_lane(lane)
    # Twice: with the stopwatch and without it, in turns. A prompt may take a step of its own.
    steps = 2 * samples * _BATCH + 2 * _WARM_STEPS + rows
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
    cost = StepCost(rows)
    yardstick_us()  # the first one is slow
    for _ in range(samples):
        cost.yardstick.append(yardstick_us())
        begun = thread_time_ns()
        for _ in range(_BATCH):
            step()
        cost.cpu.append((thread_time_ns() - begun) / 1e3 / _BATCH)
        watch = Stopwatch()
        _watch(watch, engine, emitter, lane)
        try:
            for _ in range(_BATCH):
                step()
        finally:
            watch.unwrap()
        for part, nanoseconds in watch.take().items():
            cost.parts.setdefault(part, []).append(nanoseconds / 1e3 / _BATCH)
    for job in jobs:
        engine.cancel(job, AbortCause.CANCEL)
    while engine.scheduler.has_work:
        step()
    return cost


def beside_arithmetic(cost: StepCost) -> list[float]:
    """Microseconds per step of the worker's own work, by sample."""
    own = [times for part, times in cost.parts.items() if part not in ARITHMETIC]
    return [sum(times) for times in zip(*own, strict=True)]


def per_row(costs: Iterable[StepCost], of: Callable[[StepCost], list[float]]) -> list[float]:
    """Microseconds that one row more adds, by sample: from the fewest rows to the most."""
    ordered = sorted(costs, key=lambda cost: cost.rows)
    few, many = ordered[0], ordered[-1]
    return [
        (more - less) / (many.rows - few.rows) for less, more in zip(of(few), of(many), strict=True)
    ]


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


def _watch(watch: Stopwatch, engine: Engine, emitter: Emitter, lane: Lane) -> None:
    runner: Any = engine.executor.runner
    calls: list[tuple[Any, str, str]] = [
        (engine, "step", "engine, the rest"),
        (engine, "_end_expired", "deadlines and aborts"),
        (engine.scheduler, "schedule", "schedule"),
        (engine.executor, "run", "engine, the rest"),
        (engine.executor, "_collect", "forward"),  # of a launched step: mostly a wait
        (engine, "_measure", "step times, statistics"),
        (engine, "_snapshot", "step times, statistics"),
        (engine, "_apply", "tokens out"),
        (emitter, "sink", "from engine to emitter"),
        (emitter, "cycle", "emitter, the rest"),
        (emitter, "_take", "from engine to emitter"),
        (emitter, "_apply", "detokenise, deltas"),
        (emitter, "_check_for_lost_clients", "clients gone?"),
        (lane, "flush", "frame"),
        (lane_module, "encode", "frame"),
    ]
    if hasattr(runner, "_table"):
        calls += [
            (runner, "execute", "results"),
            (runner, "_pack", "tensors in"),
            (runner._table, "slots_of", "tensors in"),
            (runner._forward, "hidden", "forward"),
            (runner._forward, "logits", "forward"),
            (runner._sampler, "sample", "sample"),
        ]
        if hasattr(runner, "launch"):
            calls.append((runner, "launch", "tensors in"))
        if getattr(runner, "_graphs", None) is not None:
            calls.append((runner._graphs, "replay", "forward"))
    else:
        calls.append((runner, "execute", "made-up tokens"))
    for owner, name, part in calls:
        watch.wrap(owner, name, part)
