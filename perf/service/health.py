"""Health endpoints while 32 streams run as fast as they go (LB-4).

One client asks ``/health/live``, ``/health/ready`` and ``/health`` in turn on a kept-alive
connection, as probes do, at random intervals; then 100 checks start at the same moment, each on a
connection of its own, connecting included. All must answer 200.
"""

import asyncio
import random
import time

from perf import SEED
from perf.load.connection import HOST, HttpConnection, HttpError
from perf.load.drive import CLIENTS, Target, flood
from perf.report.bundle import Figure
from perf.stack.context import Bench, Context
from perf.stack.stack import StackSpec

_PATHS = ("/health/live", "/health/ready", "/health")
_AT_ONCE = 100
_WARM_S = 1.0


async def run(context: Context) -> list[Figure]:
    stack = await context.stack(StackSpec("synthetic-free", device=context.device))
    target = Target(stack.port, {})
    checks, load_s = (100, 3.0) if context.quick else (1000, 15.0)
    async with asyncio.TaskGroup() as group:
        load = group.create_task(flood(target, warm_s=_WARM_S, window_s=load_s, windows=1))
        await asyncio.sleep(_WARM_S)
        times = await _in_turn(stack.port, checks)
        at_once = await _at_once(stack.port)
        if load.done():
            raise RuntimeError("the load ended before the checks did")
    return [
        Figure.of("health.p50_ms", "one check, p50", "ms", times, spread="p5–p95"),
        Figure.tail_of("health.p99_ms", "one check, p99", "ms", times, 99),
        Figure.tail_of("health.at_once_p95_ms", f"{_AT_ONCE} at once, p95", "ms", at_once, 95),
    ]


async def _in_turn(port: int, checks: int) -> list[float]:
    """Milliseconds of each check."""
    draw = random.Random(SEED)
    times = []
    async with HttpConnection(HOST, port) as connection:
        for turn in range(checks):
            times.append(await _check(connection, _PATHS[turn % len(_PATHS)]))
            await asyncio.sleep(draw.uniform(0.002, 0.012))
    return times


async def _at_once(port: int) -> list[float]:
    async def one() -> float:
        begun = time.perf_counter()
        async with HttpConnection(HOST, port) as connection:
            await _check(connection, "/health/ready")
        return (time.perf_counter() - begun) * 1000

    return await asyncio.gather(*(one() for _ in range(_AT_ONCE)))


async def _check(connection: HttpConnection, path: str) -> float:
    begun = time.perf_counter()
    connection.send("GET", path)
    status, body = await connection.answer()
    if status != 200:
        raise HttpError(f"{path} answered {status}: {body[:200]!r}")
    return (time.perf_counter() - begun) * 1000


BENCH = Bench("health", f"health checks beside {CLIENTS} streams at full speed", run, limit_s=90)
