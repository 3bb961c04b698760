"""Time from the client's cancel or hang-up until the slot is free for another job (WP-1, WP-2,
WP-5). The worker runs one job at a time (``max_running`` 1). A second job, on the benchmark's own
lane, waits for that slot::

    job A runs ────────────── act ──────▶ freed│
    job B            waits ────────────────────│ started        (on the worker's clock)

It measures the time from the act (cancel request sent, socket closed) until the worker admits B.
The worker reports B's wait in its queue to the microsecond, so nothing is polled. The start of B's
wait is uncertain by B's way to the worker. So the whole round trip of a lane message is added, and
figures are too high by about half a millisecond. The act comes at a random point of the engine's
step.

The worker reports the step time. The target is one step + 5 ms at the median.
"""

import asyncio
import random
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from perf import SEED
from perf.load.connection import FIRST_TEXT, HOST, HttpConnection
from perf.load.drive import PATH, completion
from perf.load.lane import BenchLane, open_lane
from perf.report.bundle import Figure
from perf.report.stats import median
from perf.stack.context import Bench, BenchContext
from perf.stack.stack import Stack, StackSpec

Act = Callable[[], Awaitable[None]]
Start = Callable[[], AbstractAsyncContextManager[Act]]
_TASK_ID = re.compile(rb'"task_id": ?"([^"]+)"')
_TOKENS = 1500
_WAIT_S = 20.0
_WARM_UP = 3


async def run(context: BenchContext) -> list[Figure]:
    figures, device = [], context.device
    # As on the CPU: a step that is launched ahead would have to be read as well.
    plain = {"TIDEGATE_WORKER__OVERLAP": "false"}
    for label, spec in (
        ("20 ms steps", StackSpec("synthetic-paced", device=device, max_running=1, more=plain)),
        ("demo model", StackSpec("torch", device=device, max_running=1)),
    ):
        if context.quick and spec.engine == "torch":
            continue
        stack = await context.stack(spec)
        async with open_lane(stack.grpc_address) as lane:
            figures += await _on_engine(context, stack, lane, label)
    return figures


async def _on_engine(
    context: BenchContext, stack: Stack, lane: BenchLane, label: str
) -> list[Figure]:
    samples = 12 if context.quick else 60
    draw = random.Random(SEED)
    model = lane.card.model
    ways: dict[str, tuple[str, Start]] = {
        "cancel": ("cancel by API", lambda: _running_task(stack, model)),
        "disconnect": ("disconnect, streaming", lambda: running_stream(stack.port, model)),
        "disconnect_plain": (
            "disconnect, not streaming",
            lambda: _running_call(stack, model, lane),
        ),
    }
    engine = "paced" if label.startswith("20") else "demo"
    figures = []
    for key, (what, start) in ways.items():
        freed = []
        for turn in range(_WARM_UP + samples):
            took_ms = await freed_ms(lane, start(), draw)
            if turn >= _WARM_UP:
                freed.append(took_ms)
        name = f"freed.{engine}.{key}_ms"
        figures += [
            Figure.of(name, f"{label}: {what}, p50", "ms", freed, spread="p5–p95"),
            Figure.tail_of(
                name.replace("_ms", "_p95_ms"), f"{label}: {what}, p95", "ms", freed, 95
            ),
        ]
    assert lane.stats is not None
    step = [lane.stats.step_ms]
    figures.append(Figure.of(f"freed.{engine}.step_ms", f"{label}: one step", "ms", step))
    return figures


async def freed_ms(
    lane: BenchLane, running: AbstractAsyncContextManager[Act], draw: random.Random
) -> float:
    """Milliseconds from the act to the slot's next tenant, for one running job."""
    async with asyncio.timeout(_WAIT_S), running as act:
        round_trip_s = await _lane_round_trip_s(lane)
        waiting = lane.submit(1)
        await asyncio.sleep(0.01 + draw.uniform(0.0, 0.02))
        if waiting.started.done():
            raise RuntimeError("the waiting job started while the slot was taken")
        acted_at = time.perf_counter()
        await act()
        started = await waiting.started
        await waiting.ended
    return (waiting.submitted_at + round_trip_s + started.wait_ms / 1000 - acted_at) * 1000


async def _lane_round_trip_s(lane: BenchLane) -> float:
    """Round trip of a message that the worker answers without its engine: a job that it must
    refuse."""
    trips = []
    for _ in range(3):
        refused = lane.submit(0)
        _, answered_at = await refused.ended
        trips.append(answered_at - refused.submitted_at)
    return median(trips)


@asynccontextmanager
async def _running_task(stack: Stack, model: str) -> AsyncIterator[Act]:
    """Run a native task that streams; the act is a cancel request on a connection of its own."""
    body = {
        "model": model,
        "prompt": "Time and tide",
        "max_tokens": _TOKENS,
        "ignore_eos": True,
        "temperature": 0,
    }
    async with (
        HttpConnection(HOST, stack.port) as calls,
        HttpConnection(HOST, stack.port) as events,
    ):
        calls.send("POST", "/v2/tasks", body)
        _, answer = await calls.answer()
        found = _TASK_ID.search(answer)
        if found is None:
            raise RuntimeError(f"no task id in {answer!r}")
        path = f"/v2/tasks/{found[1].decode()}"
        events.send("GET", f"{path}/events")
        await events.until(FIRST_TEXT)

        async def act() -> None:
            calls.send("POST", f"{path}/cancel")

        yield act


@asynccontextmanager
async def running_stream(port: int, model: str) -> AsyncIterator[Act]:
    """Run an OpenAI stream; the act closes its socket."""
    async with HttpConnection(HOST, port) as stream:
        stream.send("POST", PATH, completion(model, _TOKENS))
        await stream.until(FIRST_TEXT)

        async def act() -> None:
            stream.drop()

        yield act


@asynccontextmanager
async def _running_call(stack: Stack, model: str, lane: BenchLane) -> AsyncIterator[Act]:
    """Run an OpenAI request without streaming; the act closes its socket."""
    body = completion(model, _TOKENS) | {"stream": False}
    del body["stream_options"]
    async with HttpConnection(HOST, stack.port) as call:
        call.send("POST", PATH, body)
        await _until_generating(lane)

        async def act() -> None:
            call.drop()

        yield act


async def _until_generating(lane: BenchLane) -> None:
    """Wait for the worker's own word that tokens come, where the client hears of none."""
    before = (await lane.news()).tokens_total
    while (await lane.news()).tokens_total < before + 3:
        pass


BENCH = Bench("cancel", "from cancel or disconnect to the slot being free", run, limit_s=240)
