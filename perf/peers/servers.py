"""The servers: ours as a user would start it, and vLLM.

Those that take turns stay up for the whole run, and only one has anything to do at a time. What the
others take of the machine meanwhile is measured (``Served.cpu_s``), to show that it is next to
nothing.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from catalog.errors import StartFailed
from catalog.paths import state_dir
from perf.load.connection import HOST
from perf.load.cpu import process_cpu_s
from perf.load.open_loop import OpenLoopPlan, Result, StreamRequest
from perf.peers.installs import VLLM
from perf.report.command import Skip
from perf.stack.offer import BUSY, offer
from perf.stack.stack import Stack, StackSpec, running
from pool.process.http_get import http_status
from pool.process.logs import fresh_log, tail
from pool.process.ports import free_ports
from pool.process.process import GuardedProcess, children_of, command_environment

MODEL: Final = "demo"
"""Name that every checkpoint is served by."""
SLOTS: Final = 64
"""Number of requests that run at once, in either server."""
CONTEXT_TOKENS: Final = 2048
"""Context of the demo model; vLLM is told to have no more for any."""

_READY_S: Final = 420.0
"""Seconds until vLLM is ready: when it starts for the first time it compiles its model."""
_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Served:
    """One server. ``busy`` are the gauges that are 0 when it has nothing to do; ``pids`` are all
    of its processes by name."""

    name: str
    label: str
    port: int
    takes_deadlines: bool
    busy: tuple[str, ...]
    pids: dict[str, int]

    def cpu_s(self) -> float:
        """Seconds of CPU that all of it has used."""
        return sum(process_cpu_s(pid) for pid in self.pids.values())

    async def offer(
        self, path: str, asks: Sequence[StreamRequest], linger_s: float, *, hang_up: bool = False
    ) -> list[Result]:
        """Send it requests, and wait until nothing is left of them."""
        states = self.takes_deadlines and hang_up
        plan = OpenLoopPlan(HOST, self.port, path, list(asks), states, linger_s, hang_up)
        return await offer(plan, self.label, self.busy)


def tidegate(stack: Stack) -> Served:
    """Tidegate's running stack as a server to measure."""
    return Served("tidegate", "Tidegate", stack.port, True, BUSY, stack.pids())


@asynccontextmanager
async def both(checkpoint: Path) -> AsyncIterator[tuple[Stack, tuple[Served, Served]]]:
    """Start ours and vLLM, which is installed, on one checkpoint. Raises ``Skip`` where vLLM does
    not start."""
    async with AsyncExitStack() as servers:
        peer = await servers.enter_async_context(vllm(checkpoint))
        spec = StackSpec(max_running=SLOTS, model=checkpoint, model_name=MODEL)
        stack = await servers.enter_async_context(running(spec))
        yield stack, (tidegate(stack), peer)


@asynccontextmanager
async def vllm(checkpoint: Path) -> AsyncIterator[Served]:
    """Start vLLM, which is installed, on a checkpoint. Raises ``Skip`` where it does not start."""
    port = free_ports(1)[0]
    # Not by its ``vllm`` command: that looks for a package of that name, and the wheel has another.
    command = [str(VLLM.python), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(checkpoint), "--served-model-name", MODEL]
    command += ["--host", HOST, "--port", str(port), "--dtype", "bfloat16"]
    command += ["--max-num-seqs", str(SLOTS), "--max-model-len", str(CONTEXT_TOKENS)]
    command += ["--disable-uvicorn-access-log"]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "auto",
        # Our connections are kept and used again; after its 5 s one might close as we send.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "300",
        "VLLM_CACHE_ROOT": str(VLLM.home / "cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # vLLM's manual asks for this on Intel's OpenMP.
        "LD_PRELOAD": str(VLLM.home / "lib" / "libiomp5.so"),
    }
    async with _process(str(VLLM), VLLM.package, command, env, port) as pid:
        pids = {f"{VLLM.package}-{pid}": pid for pid in _family(pid)}
        busy = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        yield Served("vllm", VLLM.label, port, False, busy, pids)


@asynccontextmanager
async def _process(
    peer: str,
    log_name: str,
    command: Sequence[str],
    env: dict[str, str],
    port: int,
) -> AsyncIterator[int]:
    """Start a peer; yields its process id once it is healthy. Raises ``Skip`` when it does not
    start."""
    log = state_dir() / "perf" / f"{log_name}.log"
    fresh_log(log)
    try:
        process = await GuardedProcess.start(peer, command, env=command_environment(env), log=log)
    except StartFailed as error:
        raise Skip(f"{peer} does not start here: {error}") from error
    try:
        end = time.monotonic() + _READY_S
        while await http_status(HOST, port, "/health") != 200:
            if not process.running or time.monotonic() > end:
                raise Skip(f"{peer} does not start here: {_last_line(log)}")
            await asyncio.sleep(_POLL_S)
        yield process.pid
    finally:
        await process.end(5.0)


def _last_line(log: Path) -> str:
    return tail(log).strip().rpartition("\n")[2].strip() or "it said nothing"


def _family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    return [pid, *(found for child in children_of(pid) for found in _family(child))]
