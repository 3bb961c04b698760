"""Start-up times of a ``tidegate`` command, an orchestrator, and ``tidegate up`` with the demo
model.

Each is a new process. Its files are in the page cache and its loops are compiled, as from the
second start after an installation.
"""

import asyncio
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from signal import SIGINT

from catalog.paths import ROOT, state_dir
from perf.load.connection import HOST
from perf.report.bundle import Figure
from perf.stack.context import Bench, BenchContext
from pool.engines.triton_wheel import wheel_dir
from pool.process.http_get import http_status
from pool.process.ports import free_ports

_POLL_S = 0.005
_LONGEST_S = 60.0
_SERVES = b"serving on"
"""Beginning of the line of ``tidegate up`` that says that it serves."""

Start = Callable[[dict[str, str], str], Awaitable[float]]
"""Starts something with variables on a device; returns the seconds until it was of use."""


async def run(context: BenchContext) -> list[Figure]:
    turns = 3 if context.quick else 7
    starts: dict[str, tuple[str, Start]] = {
        "command": ("a command: tidegate models, which finds no service", _command),
        "orchestrator": ("an orchestrator, until it answers", _orchestrator),
        "up": ("tidegate up, until the demo model serves", _up),
    }
    took: dict[str, list[float]] = {name: [] for name in starts}
    with tempfile.TemporaryDirectory(prefix="tidegate-starts-") as home:
        env = os.environ | {"TIDEGATE_HOME": home, "TIDEGATE_HEALTH__PORT": "-1"}
        wheel = wheel_dir(state_dir())
        if wheel.is_dir():
            (Path(home) / wheel.name).symlink_to(wheel)
        for turn in range(1 + turns):
            for name, (_, start) in starts.items():
                seconds = await start(env, context.device)
                if turn:  # the first one reads from the disk, and compiles where nobody has yet
                    took[name].append(seconds)
    return [
        Figure.of(f"starts.{name}_s", what, "s", took[name]) for name, (what, _) in starts.items()
    ]


async def _command(env: dict[str, str], _: str) -> float:
    began = time.perf_counter()
    async with _process(env, "tidegate", "models") as process:
        await process.communicate()
        return time.perf_counter() - began


async def _orchestrator(env: dict[str, str], _: str) -> float:
    port, nobody = free_ports(2)
    ports = {"TIDEGATE_PORT": str(port), "TIDEGATE_INSTANCES": f"{HOST}:{nobody}"}
    began = time.perf_counter()
    async with _process(env | ports, "orchestrator"):
        while await http_status(HOST, port, "/health/live") != 200:  # noqa: ASYNC110 - no event
            await asyncio.sleep(_POLL_S)
        return time.perf_counter() - began


async def _up(env: dict[str, str], device: str) -> float:
    began = time.perf_counter()
    async with _process(env, "tidegate", "up", "--device", device, "--port", "0") as process:
        assert process.stdout is not None
        said = b""
        while not (line := await process.stdout.readline()).startswith(_SERVES):
            said += line
            if not line:
                raise RuntimeError(f"tidegate up ended: {said.decode(errors='replace')}")
        return time.perf_counter() - began


@asynccontextmanager
async def _process(
    env: dict[str, str], module: str, *arguments: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """``python -m module`` in the checkout, for a minute at most, interrupted at the end."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        cwd=ROOT,
        env=env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(_LONGEST_S):
            yield process
    finally:
        if process.returncode is None:
            process.send_signal(SIGINT)
        await process.communicate()


BENCH = Bench(
    "starts", "what people wait for, from the second start on", run, limit_s=150, in_quick=False
)
