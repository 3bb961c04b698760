"""Latency of health endpoints while 32 streams run at full speed (LB-4).

It measures the main port and the health port in turns. On each, a probe requests ``/health/live``,
``/health/ready`` and ``/health`` on a keep-alive connection, at random intervals. Then 100 checks
start at the same time, each on a new connection, whose setup counts. All must answer 200.

The probes block in their own thread. An asyncio client would take 20 ms of CPU for 100 connections,
on the same cores as the server.
"""

import asyncio
import random
import selectors
import socket
import time
from contextlib import ExitStack
from dataclasses import dataclass

from perf import SEED
from perf.load.connection import HOST, HttpError, request_bytes
from perf.load.drive import CLIENTS, FloodTarget, MeasuredWindows, flood
from perf.report.bundle import Figure
from perf.stack.context import Bench, BenchContext
from perf.stack.stack import StackSpec

_PATHS = ("/health/live", "/health/ready", "/health")
_AT_ONCE = 100
_WARM_S = 1.0
_LONGEST_S = 120.0
"""Longest time in seconds of the load, which ends with the checks."""
_TURNS = 4
_TIMEOUT_S = 10.0


async def run(context: BenchContext) -> list[Figure]:
    spec = StackSpec("synthetic-free", device=context.device, with_health_port=True)
    stack = await context.stack(spec)
    target = FloodTarget(stack.port, {})
    checks = 30 if context.quick else 300
    ports = {"main": stack.port, "port": stack.health_port}
    times: dict[str, list[float]] = {name: [] for name in ports}
    at_once: dict[str, list[float]] = {name: [] for name in ports}
    async with asyncio.TaskGroup() as group:
        load = group.create_task(flood(target, MeasuredWindows(_WARM_S, _LONGEST_S, 1)))
        await asyncio.sleep(_WARM_S)
        for turn in range(_TURNS):
            for name, port in ports.items():
                times[name] += await asyncio.to_thread(_in_turn, port, checks, SEED + turn)
                at_once[name] += await asyncio.to_thread(_at_once, port)
        if load.done():
            raise RuntimeError("the load ended before the checks did")
        load.cancel()
    return [
        *_figures("health", "one check", times["main"], at_once["main"]),
        *_figures("health.port", "health port: one check", times["port"], at_once["port"]),
    ]


def _figures(key: str, what: str, times: list[float], at_once: list[float]) -> list[Figure]:
    together = what.replace("one check", f"{_AT_ONCE} at once")
    return [
        Figure.of(f"{key}.p50_ms", f"{what}, p50", "ms", times, spread="p5–p95"),
        Figure.tail_of(f"{key}.p99_ms", f"{what}, p99", "ms", times, 99),
        Figure.tail_of(f"{key}.at_once_p95_ms", f"{together}, p95", "ms", at_once, 95),
    ]


def _request(port: int, path: str) -> bytes:
    return request_bytes(HOST, port, "GET", path)


def _in_turn(port: int, checks: int, seed: int) -> list[float]:
    """Time health checks one after the other; returns the milliseconds of each."""
    draw = random.Random(seed)
    times = []
    with socket.create_connection((HOST, port), timeout=_TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for turn in range(checks):
            request = _request(port, _PATHS[turn % len(_PATHS)])
            begun = time.perf_counter()
            connection.sendall(request)
            answer = b""
            while not _is_whole(answer):
                answer += _received(connection)
            times.append((time.perf_counter() - begun) * 1000)
            time.sleep(draw.uniform(0.002, 0.012))
    return times


@dataclass(slots=True)
class _Check:
    connection: socket.socket
    begun: float
    answer: bytes = b""


def _at_once(port: int) -> list[float]:
    """Time checks that start together; returns the milliseconds of each, connecting included."""
    request = _request(port, "/health/ready")
    times: list[float] = []
    with ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        for _ in range(_AT_ONCE):
            connection = stack.enter_context(socket.socket())
            connection.setblocking(False)
            check = _Check(connection, time.perf_counter())
            selector.register(connection, selectors.EVENT_WRITE, check)
            connection.connect_ex((HOST, port))
        while len(times) < _AT_ONCE:
            ready = selector.select(_TIMEOUT_S)
            if not ready:
                raise HttpError(f"{_AT_ONCE - len(times)} checks got no answer")
            for key, events in ready:
                check = key.data
                if events & selectors.EVENT_WRITE:
                    check.connection.sendall(request)
                    selector.modify(check.connection, selectors.EVENT_READ, check)
                    continue
                check.answer += _received(check.connection)
                if _is_whole(check.answer):
                    times.append((time.perf_counter() - check.begun) * 1000)
                    selector.unregister(check.connection)
    return times


def _received(connection: socket.socket) -> bytes:
    data = connection.recv(65536)
    if not data:
        raise HttpError("the server hung up")
    return data


def _is_whole(answer: bytes) -> bool:
    """Whether all of the response is there. Raises ``HttpError`` for any but 200."""
    head, end, body = answer.partition(b"\r\n\r\n")
    if not end:
        return False
    if not head.startswith(b"HTTP/1.1 200"):
        raise HttpError(f"a health check was answered {answer[:300]!r}")
    length = next(
        int(line.partition(b":")[2])
        for line in head.split(b"\r\n")
        if line.lower().startswith(b"content-length:")
    )
    return len(body) >= length


BENCH = Bench(
    "health", f"health checks next to {CLIENTS} streams at full speed", run, limit_s=_LONGEST_S
)
