"""``make bench-swap``: another model in a worker's own process, under load, by phase.

    python -m perf.swap [--quick] [--json PATH]

under load: streams with deadlines run on one instance while its model is replaced, with the new one
loaded beside the old and without. Lost are streams that did not end well, whatever the reason;
a deadline is missed where the answer says so.
on demand: the first answer of a model that is not loaded, the next one, and how soon one is
refused whose deadline cannot wait for the load.
blue/green: two instances in turn, under the same load.

Demo model throughout; the other one is a copy of it with another base of its rotary positions.
"""

import argparse
import asyncio
import json
import shutil
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp

from catalog.operator_key import access
from catalog.paths import DEMO_CHECKPOINT
from perf.load.lane import open_lane
from perf.report.bundle import BenchResult, Figure
from perf.report.command import begin, new_console, new_parser, result, status_of
from perf.report.table import show
from perf.stack.stack import StackSpec, orchestrating, tritons

CLIENTS = 4
DEADLINE_MS = 10_000
BODY = {"prompt": "Once upon", "max_tokens": 48, "ignore_eos": True}
_MIN_DEADLINE_MS = 60
"""Deadline that is less than any load takes here, and more than an answer's first steps."""


@dataclass
class StreamEnds:
    """Ends of the streams: ``met``, ``lost`` (each with its reason) or ``missed``."""

    met: int = 0
    lost: list[str] = field(default_factory=list)
    missed: int = 0
    is_over: bool = False


@asynccontextmanager
async def load(http: aiohttp.ClientSession, clients: int = CLIENTS) -> AsyncIterator[StreamEnds]:
    """Keep ``clients`` streams of the model ``demo`` running, each to its end."""
    state = StreamEnds()

    async def client() -> None:
        while not state.is_over:
            status, text = await _ask(http, "demo", DEADLINE_MS, stream=True)
            told = text.replace(" ", "")
            if status == 200 and '"finish_reason":"length"' in told:
                state.met += 1
            elif '"code":"deadline_' in told:
                state.missed += 1
            else:
                state.lost.append(f"{status}: {text[-200:]}")

    running = [asyncio.create_task(client()) for _ in range(clients)]
    try:
        await asyncio.sleep(1.0)  # under way
        yield state
        await asyncio.sleep(0.5)
    finally:
        state.is_over = True
        await asyncio.gather(*running)


async def _ask(
    http: aiohttp.ClientSession, model: str, timeout_ms: int, *, stream: bool = False
) -> tuple[int, str]:
    headers = {"X-Timeout-Ms": str(timeout_ms)}
    body = BODY | {"model": model, "stream": stream}
    async with http.post("/v1/completions", json=body, headers=headers) as response:
        return response.status, await response.text()


@dataclass(frozen=True, slots=True)
class Swapped:
    """One swap as the orchestrator reports it."""

    ms: dict[str, float]
    total_ms: float
    freed_mib: float


async def _swap(http: aiohttp.ClientSession, address: str, path: Path, **settings: str) -> Swapped:
    body = {"model": str(path), "name": "demo", "settings": settings, "wait": True}
    async with http.post(f"/v2/instances/{address}/swap", json=body) as response:
        told = await response.json()
        if response.status != 200:
            raise RuntimeError(f"swap failed: {told}")
    return Swapped(told["ms"], told["total_ms"], told["freed_mib"])


async def under_load(
    http: aiohttp.ClientSession, address: str, paths: tuple[Path, Path], rounds: int, beside: str
) -> list[Figure]:
    """Swap to and fro under load, ``beside`` as ``SWAP_BESIDE`` has it."""
    swaps: list[Swapped] = []
    async with load(http) as state:
        for number in range(rounds):
            swaps.append(await _swap(http, address, paths[1 - number % 2], SWAP_BESIDE=beside))
            await asyncio.sleep(0.5)
    key = "beside" if beside == "auto" else "alone"
    phases = dict.fromkeys(phase for swap in swaps for phase in swap.ms)
    return [
        Figure.of(f"{key}_total_ms", "swap", "ms", [swap.total_ms for swap in swaps]),
        *(
            Figure.of(
                f"{key}_{phase}_ms", phase, "ms", [s.ms[phase] for s in swaps if phase in s.ms]
            )
            for phase in phases
        ),
        Figure.of(
            f"{key}_freed_mib",
            "memory given back",
            "MiB",
            [swap.freed_mib for swap in swaps],
            better="neither",
        ),
        *_outcomes(key, state),
    ]


def _outcomes(key: str, state: StreamEnds) -> list[Figure]:
    for fault in state.lost[:3]:
        print(f"lost: {fault}", file=sys.stderr)
    return [
        Figure.of(f"{key}_met", "streams met", "streams", [float(state.met)], better="neither"),
        Figure.of(f"{key}_lost", "streams lost", "streams", [float(len(state.lost))]),
        Figure.of(f"{key}_missed", "deadlines missed", "streams", [float(state.missed)]),
    ]


async def on_demand(http: aiohttp.ClientSession, rounds: int) -> list[Figure]:
    """Ask for models in turns on one instance that is idle otherwise."""
    cold: list[float] = []
    warm: list[float] = []
    refused: list[float] = []
    for _ in range(rounds):
        async with http.get("/v1/models") as response:
            states = {one["id"]: one["state"] for one in (await response.json())["data"]}
        (model,) = [name for name, state in states.items() if state == "loadable"]
        status, ms = await _timed(http, model, _MIN_DEADLINE_MS)
        if status == 504:
            refused.append(ms)
        for times in (cold, warm):
            status, ms = await _timed(http, model, 30_000)
            if status != 200:
                raise RuntimeError(f"{model} was not served: {status}")
            times.append(ms)
    figures = [
        Figure.of("first_cold_ms", "first answer of a model that is not loaded", "ms", cold),
        Figure.of("next_ms", "the next one", "ms", warm),
    ]
    if refused:
        figures.append(
            Figure.of("refused_ms", "refused, with a deadline that cannot wait", "ms", refused)
        )
    return figures


async def _timed(http: aiohttp.ClientSession, model: str, timeout_ms: int) -> tuple[int, float]:
    began_at = time.perf_counter()
    status, _ = await _ask(http, model, timeout_ms)
    return status, 1000 * (time.perf_counter() - began_at)


async def blue_green(
    http: aiohttp.ClientSession, addresses: list[str], paths: tuple[Path, Path], rounds: int
) -> list[Figure]:
    """Swap all instances one after the other, each once the one before it is ready."""
    total = []
    async with load(http) as state:
        for number in range(rounds):
            began_at = time.perf_counter()
            for address in addresses:
                await _swap(http, address, paths[1 - number % 2])
            total.append(1000 * (time.perf_counter() - began_at))
            await asyncio.sleep(0.5)
    return [Figure.of("both_ms", "both instances", "ms", total), *_outcomes("both", state)]


@asynccontextmanager
async def service(
    paths: tuple[Path, Path], count: int
) -> AsyncIterator[tuple[aiohttp.ClientSession, list[str]]]:
    """``count`` instances of the demo model: a client of their orchestrator, and their
    addresses."""
    spec = StackSpec(more={"TIDEGATE_WORKER__MODELS": json.dumps({"other": str(paths[1])})})
    async with tritons(spec, count) as units:
        addresses = [unit.grpc_address for unit in units]
        async with orchestrating(addresses, {"TIDEGATE_LOADING__MIN_RESIDENCY_S": "0"}) as unit:
            url, key = access(unit.url)
            as_operator = {"Authorization": f"Bearer {key}"}
            async with aiohttp.ClientSession(url, headers=as_operator) as http:
                yield http, addresses


def _copies(folder: Path) -> tuple[Path, Path]:
    other = folder / "other"
    shutil.copytree(DEMO_CHECKPOINT, other)
    config = other / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_theta": 20_000.0}))
    return DEMO_CHECKPOINT, other


async def main(args: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    recording = begin(parser, args, "perf.swap", *sys.argv[1:])
    rounds = 2 if args.quick else 4
    results: list[BenchResult] = []
    card = None
    with TemporaryDirectory() as folder:
        paths = _copies(Path(folder))
        async with service(paths, 1) as (http, addresses):
            async with open_lane(addresses[0]) as lane:
                card = lane.card
            with result(
                results, "under load", "One instance; the new model beside the old."
            ) as one:
                one += await under_load(http, addresses[0], paths, rounds, "auto")
            with result(results, "alone", "The same; the old model is unloaded first.") as one:
                one += await under_load(http, addresses[0], paths, rounds, "never")
            with result(results, "on demand", "Two models in turns on one instance.") as one:
                one += await on_demand(http, rounds)
        async with service(paths, 2) as (http, addresses):
            with result(results, "blue/green", "Two instances in turn, under load.") as one:
                one += await blue_green(http, addresses, paths, max(2, rounds // 2))
    bundle = recording.bundle(results, card, quick=args.quick)
    show(bundle, new_console())
    recording.save(bundle)
    return int(any(one.failed for one in results))


if __name__ == "__main__":
    parser = new_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="two swaps of each kind")
    sys.exit(status_of(main(parser.parse_args(), parser)))
