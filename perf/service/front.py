"""What a proxy of docker/proxies in front costs: the first token's way, and that of a hang-up.

Requests go to the orchestrator directly and through each proxy that is installed, in turns, over
TLS and HTTP/1.1 on a kept-alive connection. The slot is freed as ``perf.service.cancel`` has it.
"""

import asyncio
import random
import ssl
import subprocess
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from perf import SEED
from perf.load.connection import HOST, HttpConnection
from perf.load.drive import completion
from perf.load.lane import open_lane
from perf.report.bundle import Figure
from perf.report.command import Skip
from perf.service.cancel import freed_ms, running_stream
from perf.service.ttft import first_token_ms
from perf.stack import proxies
from perf.stack.context import Bench, Context
from perf.stack.proxies import KINDS, Certificate
from perf.stack.stack import Stack, StackSpec

Ports = Mapping[str, tuple[int, ssl.SSLContext | None]]
"""Ports of what is measured, by name, with how to speak TLS there; None: plain HTTP."""
_WARM_UP = 3
_DIRECT = "directly"
_MAKE_CERTIFICATE = (
    *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
    *("-nodes", "-days", "1", "-subj", f"/CN={HOST}", "-keyout", "key.pem", "-out", "cert.pem"),
)


async def run(context: Context) -> list[Figure]:
    if not any(kind.is_here for kind in KINDS):
        raise Skip(f"needs one of {', '.join(kind.name for kind in KINDS)}")
    stack = await context.stack(StackSpec("synthetic-paced", device=context.device, max_running=1))
    turns = 12 if context.quick else 60
    async with open_lane(stack.grpc_address) as lane, _fronts(stack) as ports:
        model = lane.card.model
        first = await _first_tokens(ports, model, turns)
        draw = random.Random(SEED)
        freed: dict[str, list[float]] = {name: [] for name in ports}
        for turn in range(_WARM_UP + turns):
            for name, (port, tls) in ports.items():
                took_ms = await freed_ms(lane, running_stream(port, model, tls=tls), draw)
                if turn >= _WARM_UP:
                    freed[name].append(took_ms)
    return _figures("ttft", "first token", first) + _figures(
        "freed", "slot freed after a hang-up", freed
    )


def _figures(key: str, what: str, found: Mapping[str, list[float]]) -> list[Figure]:
    figures = []
    for name, took in found.items():
        way = name if name == _DIRECT else f"through {name}"
        figures += [
            Figure.of(f"front.{key}.{name}_ms", f"{what}, {way}, p50", "ms", took, spread="p5–p95"),
            Figure.tail_of(f"front.{key}.{name}_p95_ms", f"{what}, {way}, p95", "ms", took, 95),
        ]
    return figures


@asynccontextmanager
async def _fronts(stack: Stack) -> AsyncIterator[Ports]:
    """Ports of the orchestrator and of the proxies before it."""
    trusting = ssl.create_default_context()
    trusting.check_hostname, trusting.verify_mode = False, ssl.CERT_NONE
    ports: dict[str, tuple[int, ssl.SSLContext | None]] = {_DIRECT: (stack.port, None)}
    async with AsyncExitStack() as started:
        folder = Path(started.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-front-")))
        certificate = await asyncio.to_thread(_certificate, folder)
        for kind in KINDS:
            if kind.is_here:
                proxy = proxies.running(
                    kind, folder / kind.name, f"http://{HOST}:{stack.port}", certificate=certificate
                )
                ports[kind.name] = (await started.enter_async_context(proxy), trusting)
        yield ports


def _certificate(folder: Path) -> Certificate:
    """A certificate that is signed by itself; nobody here checks it."""
    subprocess.run(_MAKE_CERTIFICATE, cwd=folder, check=True, capture_output=True)
    return Certificate((folder / "cert.pem").read_bytes(), (folder / "key.pem").read_bytes())


async def _first_tokens(ports: Ports, model: str, turns: int) -> dict[str, list[float]]:
    """Milliseconds from the request to the first token, one request at a time."""
    found: dict[str, list[float]] = {name: [] for name in ports}
    async with AsyncExitStack() as opened:
        clients = {
            name: await opened.enter_async_context(HttpConnection(HOST, port, tls))
            for name, (port, tls) in ports.items()
        }
        for turn in range(_WARM_UP + turns):
            for name, client in clients.items():
                took_ms = await first_token_ms(client, completion(model, 2))
                if turn >= _WARM_UP:
                    found[name].append(took_ms)
    return found


BENCH = Bench(
    "front",
    "first token and hang-up through a proxy in front",
    run,
    limit_s=240,
    in_quick=False,
)
