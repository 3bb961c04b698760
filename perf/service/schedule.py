"""CPU of admission and scheduling per request, with an empty queue and with 1,000 in it (LB-1).

The real orchestrator and workers as a library, on virtual time (``perf.sim``): what is
timed is everything from a parsed request to its being queued or on a lane; all that the word of a
worker that a job is over sets off, until the next one is sent; and 20 ms of the service's life in
which a client gives up: two jobs end in them, plans are made anew for all that wait, and the four
workers take their share. No socket, no other process; CPU time of the thread, so that what else
runs on the machine does not count.
"""

import asyncio
import gc
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from unittest.mock import patch

from orchestrator.build import Components
from orchestrator.tasks.task import Task
from perf import SEED
from perf.load.workload import Speed
from perf.report.bundle import Figure
from perf.report.stats import percentile
from perf.sim.arrivals import Scenario, SimArrival
from perf.sim.lane import SimLane
from perf.sim.loop import VirtualClock, VirtualLoop
from perf.sim.simulate import Fleet, new_job, new_orchestrator
from perf.sim.worker import WorkerSpec
from perf.stack.context import Bench, Context
from worker.protocol import Frame
from worker.runner.synthetic import StepCost

QUEUED = 1000
TENANTS = 10
_PATIENT_MS = 1.5e6
_KINDS = {
    "submit": "admit and queue",
    "turn": "one leaves, the next starts",
    "cycle": "20 ms with a cancel, two ends and new plans",
}
_FLEET = Fleet(WorkerSpec(StepCost(6e-3, 0.6e-3, 0.4e-3), slots=8, kv_tokens=10**6), count=4)


@dataclass(slots=True)
class _Taken:
    """CPU times in microseconds."""

    submit: list[float] = field(default_factory=list)
    turn: list[float] = field(default_factory=list)
    cycle: list[float] = field(default_factory=list)


async def run(context: Context) -> list[Figure]:
    count = 400 if context.quick else 3000
    figures = []
    for queued in (0, QUEUED):
        taken = await asyncio.to_thread(_measure, queued, count)
        for kind, what in _KINDS.items():
            samples: list[float] = getattr(taken, kind)
            name = f"schedule.{kind}_{queued}"
            label = f"{what}, {queued} queued"
            figures.append(Figure.of(f"{name}_us", label, "µs", samples, spread="p5–p95"))
            p99 = percentile(samples, 99)
            figures.append(Figure.of(f"{name}_p99_us", f"{label}, p99", "µs", [p99]))
    return figures


def _measure(queued: int, count: int) -> _Taken:
    loop = VirtualLoop()
    # The collector need not look at what lives already, as in the service.
    gc.collect()
    gc.freeze()
    try:
        return loop.run_until_complete(_drive(loop, queued, count))
    finally:
        gc.unfreeze()
        loop.close()


async def _drive(loop: VirtualLoop, queued: int, count: int) -> _Taken:
    clock = VirtualClock(loop)
    rng = random.Random(SEED)
    parts, _ = new_orchestrator(_FLEET, clock, {"QUEUE__MAX_WAITING": "-1"}, rng)
    orchestrator = parts.orchestrator
    parts.lifecycle.start()
    await asyncio.sleep(1.0)  # a time of 0 means never
    tenants = {str(i): 1.0 for i in range(TENANTS)}
    scenario = Scenario(Speed(0.4, 8.0), tenants=tenants, margin_ms=_PATIENT_MS)
    arrivals = scenario.arrivals(10_000.0, 1e9, SEED)

    async def submit(taken: list[float] | None) -> Task:
        arrival: SimArrival = next(arrivals)
        job, prompt = new_job(arrival, clock.now(), arrival.deadline_ms)
        begun = time.thread_time()
        task = await orchestrator.submit(job, prompt)
        if taken is not None:
            taken.append(1e6 * (time.thread_time() - begun))
        return task

    taken = _Taken()
    timed = _timed(SimLane.take, taken.turn)
    held = [await submit(None) for _ in range(_room(parts) + queued)]
    for _ in range(count):
        task = await submit(taken.submit)
        held.append(task)
        # Whoever runs is cancelled by its client: a slot is free once the worker says so.
        index = next(i for i, other in enumerate(held) if other.marks.dispatched)
        leaver = held.pop(index)
        begun = time.thread_time()
        with patch.object(SimLane, "take", timed):
            orchestrator.cancel(leaver)
            await asyncio.sleep(0.02)
        taken.cycle.append(1e6 * (time.thread_time() - begun))
        held = [other for other in held if other.ending is None]
        while len(held) < _room(parts) + queued:
            held.append(await submit(None))
    await parts.lifecycle.drain(0.0)
    await parts.lifecycle.close()
    return taken


def _timed(
    take: Callable[[SimLane, Frame], None], taken: list[float]
) -> Callable[[SimLane, Frame], None]:
    """Wrap ``take`` to time frames that have a job's end in them."""

    def timed(lane: SimLane, frame: Frame) -> None:
        begun = time.thread_time()
        take(lane, frame)
        if frame.ends:
            taken.append(1e6 * (time.thread_time() - begun))

    return timed


def _room(parts: Components) -> int:
    """Number of jobs that the instances take, less one."""
    backlog = parts.settings.dispatch.max_backlog
    return _FLEET.count * (_FLEET.spec.slots + backlog) - 1


BENCH = Bench("schedule", f"admission and scheduling, 0 and {QUEUED} queued", run, limit_s=180)
