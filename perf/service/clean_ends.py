"""Use that `fit` and `partial` make of deadlines, after a calm and a crowded start (DL-16).

One client on the demo model asks for more than there is time for, one request after another, and
looks at its own clock when the whole answer is there. The stack starts once on the machine as it is
and once beside processes that want each core twice; several clients keep it busy among these for a
while. Then the crowd goes, and comes back. What a service learns while its machine is crowded must
not cost its later clients their time.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from perf.load.connection import HOST, HttpConnection, HttpError
from perf.load.drive import PATH
from perf.report.bundle import Figure
from perf.stack.context import Bench, Context
from perf.stack.stack import Stack, StackSpec, running
from worker.protocol import OnDeadline

DEADLINES_MS = (400.0, 1000.0)
CROWD_PER_CORE = 2
WAYS = (OnDeadline.PARTIAL, OnDeadline.FIT)
_CLIENTS = 6
_MAX_TOKENS = 1900
_WARM_UP = 2


@dataclass(slots=True)
class Used:
    """Use that one way to end at a deadline made of it."""

    shares: list[float] = field(default_factory=list)
    """Shares of the deadline that were used, in percent: above 100 an answer was late."""
    unserved: int = 0
    """Number of requests answered with an error instead."""


async def run(context: Context) -> list[Figure]:
    turns, busy_s = (3, 4.0) if context.quick else (50, 20.0)
    spec = StackSpec("torch", device=context.device)
    async with running(spec) as stack:
        figures = _figures("calm", "calm start", await measure(stack, turns))
    with crowd() as ends_crowd:
        async with running(spec) as stack:
            await _keep_busy(stack, busy_s)
            ends_crowd()
            figures += _figures("after", "after a crowded start", await measure(stack, turns))
            with crowd():
                figures += _figures("crowded", "in a crowd", await measure(stack, turns))
    return figures


async def measure(stack: Stack, turns: int) -> dict[OnDeadline, Used]:
    """Ask once a turn in each way and with each deadline, one after another."""
    used = {way: Used() for way in WAYS}
    for turn in range(_WARM_UP + turns):
        for way in WAYS:
            for deadline_ms in DEADLINES_MS:
                share = await _used_percent(stack, way, deadline_ms)
                if turn < _WARM_UP:
                    continue
                if share is None:
                    used[way].unserved += 1
                else:
                    used[way].shares.append(share)
    return used


async def _keep_busy(stack: Stack, seconds: float) -> None:
    """Keep the service busy with several clients, each with one request after another."""

    async def client(number: int) -> None:
        until, count = time.monotonic() + seconds, number
        while time.monotonic() < until:
            count += 1
            await _used_percent(stack, WAYS[count % 2], DEADLINES_MS[count // 2 % 2])

    await asyncio.gather(*(client(number) for number in range(_CLIENTS)))


async def _used_percent(stack: Stack, way: OnDeadline, deadline_ms: float) -> float | None:
    """Percent of the deadline used until the whole answer is here; None for a refusal or a miss."""
    body: dict[str, object] = {
        "model": "demo",
        "prompt": "Once upon a time",
        "max_tokens": _MAX_TOKENS,
        "ignore_eos": True,
        "on_deadline": way,
        "deadline_ms": deadline_ms,
    }
    async with HttpConnection(HOST, stack.port) as http:
        sent = time.perf_counter()
        http.send("POST", PATH, body)
        try:
            await http.answer()
        except HttpError:
            return None
        return 100_000 * (time.perf_counter() - sent) / deadline_ms


def _figures(key: str, when: str, used: dict[OnDeadline, Used]) -> list[Figure]:
    figures = []
    for way, found in used.items():
        name, shares = f"clean_ends.{key}.{way}", found.shares
        late = 100 * sum(share > 100 for share in shares) / len(shares)
        unserved = 100 * found.unserved / (len(shares) + found.unserved)
        figures += [
            Figure.of(
                f"{name}_used",
                f"{way}, {when}: of the deadline used",
                "%",
                shares,
                spread="p5–p95",
                better="higher",
            ),
            Figure.of(f"{name}_late", f"{way}, {when}: late", "%", [late]),
            Figure.of(f"{name}_unserved", f"{way}, {when}: without an answer", "%", [unserved]),
        ]
    return figures


@contextmanager
def crowd() -> Iterator[Callable[[], None]]:
    """Start processes that want every core ``CROWD_PER_CORE`` times, until the body ends or calls
    the function that it is given."""
    count = CROWD_PER_CORE * len(os.sched_getaffinity(0))
    spin = (sys.executable, "-c", "while True: pass")
    processes = [subprocess.Popen(spin) for _ in range(count)]

    def end() -> None:
        for process in processes:
            process.kill()
            process.wait()

    try:
        yield end
    finally:
        end()


BENCH = Bench("clean_ends", "deadlines that fit and partial fill", run, limit_s=900, in_quick=False)
