"""``make bench-peers``: Tidegate beside vLLM and vllm-router, in one run, in turns.

    python -m perf.peers [--quick] [--only PART …] [--json PATH] [--rates R …] [--seconds S]
                         [--skip-install]

goodput: chats of clients with 1, 3 and 8 s of patience, at each offered rate, to Tidegate and vLLM.
speed: tokens per second of both at 1, 8 and 32 streams.
relay: CPU per relayed token of the orchestrator and of vllm-router.

A peer that cannot be installed or started here is skipped by name; the exit status is 1 only when
something failed.
"""

import argparse
import asyncio
import shlex
import signal
import sys
import time
from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from rich.console import Console

from perf.load.lane import open_lane
from perf.peers import goodput, relay, speed
from perf.peers.goodput_cell import Cell, show_cells
from perf.peers.installs import ROUTER, VLLM
from perf.peers.servers import SLOTS, Served, both
from perf.report.bundle import BenchResult, Bundle, Figure, Machine, write
from perf.report.machine import commit, describe_machine, versions
from perf.report.table import show
from perf.stack.context import SEED, Skip
from perf.stack.stack import Stack
from worker.protocol import ModelCard

PARTS: Final = {
    "goodput": "chats met in time, beside vLLM",
    "speed": "tokens per second, beside vLLM",
    "relay": "the cost of a relayed token, beside vllm-router",
}


@dataclass(frozen=True, slots=True)
class Size:
    """How much to measure."""

    goodput: goodput.Load
    speed: speed.Load
    relay: relay.Load


FULL: Final = Size(
    goodput.Load((6.0, 12.0, 20.0), warm_s=4.0, window_s=15.0, rounds=3),
    speed.Load((1, 8, 32), tokens=256, rounds=7),
    relay.Load(window_s=1.0, windows=3, rounds=5),
)
QUICK: Final = Size(
    goodput.Load((12.0,), warm_s=1.0, window_s=4.0, rounds=1),
    speed.Load((1, 8), tokens=128, rounds=2),
    relay.Load(window_s=0.5, windows=2, rounds=1),
)


@dataclass(slots=True)
class Run:
    """What a run has found so far."""

    size: Size
    install: bool
    console: Console
    results: list[BenchResult] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    card: ModelCard | None = None
    triton: str = ""
    machine: Machine = field(default_factory=describe_machine)

    async def parts(self, only: Sequence[str]) -> None:
        """Measure one part after the other; the first two share their servers."""
        if beside_vllm := [name for name in ("goodput", "speed") if name in only]:
            async with AsyncExitStack() as stack:
                try:
                    self._say(f"{VLLM} and Tidegate start (minutes) …")
                    ours, servers = await stack.enter_async_context(both(install=self.install))
                except Skip as reason:
                    self.results += [
                        BenchResult(name, PARTS[name], 0.0, skipped=str(reason))
                        for name in beside_vllm
                    ]
                else:
                    await self._read_card(ours)
                    for name in beside_vllm:
                        part = self._goodput if name == "goodput" else self._speed
                        await self._part(name, part(servers))
        if "relay" in only:
            await self._part("relay", relay.measure(self.size.relay, install=self.install))

    async def _goodput(self, servers: tuple[Served, Served]) -> list[Figure]:
        self.cells = await goodput.measure(servers, self.size.goodput, SEED, self.console)
        return [figure for cell in self.cells for figure in cell.figures()]

    async def _speed(self, servers: tuple[Served, Served]) -> list[Figure]:
        return await speed.measure(servers, self.size.speed, SEED)

    async def _part(self, name: str, measured: Awaitable[list[Figure]]) -> None:
        self._say(f"{name}: {PARTS[name]} …")
        begun = time.monotonic()
        figures, skipped, failed = list[Figure](), "", ""
        try:
            figures = await measured
        except Skip as reason:
            skipped = str(reason)
        except Exception as error:  # whatever it is, the other parts still run
            failed = f"{type(error).__name__}: {error}"
        seconds = round(time.monotonic() - begun, 1)
        self.results.append(BenchResult(name, PARTS[name], seconds, figures, skipped, failed))

    async def _read_card(self, ours: Stack) -> None:
        async with open_lane(ours.grpc_address) as lane:
            self.card = lane.card
        self.triton = ours.triton_version

    def _say(self, text: str) -> None:
        self.console.print(text, style="dim")


def bundle_of(run: Run, *, quick: bool, command: str) -> Bundle:
    """Everything that the run found, and what it ran on."""
    card = run.card
    peers = {peer.package: peer.version for peer in (VLLM, ROUTER) if peer.is_installed()}
    return Bundle(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        commit=commit(),
        quick=quick,
        machine=run.machine,
        versions=versions() | ({"triton": run.triton} if run.triton else {}) | peers,
        engine=f"{card.engine} {card.engine_version}, {SLOTS} slots" if card else "none",
        engine_digest=card.engine_digest if card else "",
        model=card.model if card else "none",
        model_digest=card.model_digest if card else "",
        results=run.results,
    )


def size_of(args: argparse.Namespace) -> Size:
    """As the options say."""
    size = QUICK if args.quick else FULL
    load = size.goodput
    if args.rates:
        load = load._replace(rates=tuple(args.rates))
    if args.seconds:
        load = load._replace(window_s=args.seconds)
    return Size(load, size.speed, size.relay)


async def _main(args: argparse.Namespace) -> int:
    task = asyncio.current_task()
    assert task is not None
    # SIGINT is asyncio's own; this makes SIGTERM end what was started too.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    run = Run(size_of(args), not args.skip_install, console)
    await run.parts(args.only or list(PARTS))
    command = shlex.join(["python", "-m", "perf.peers", *args.command])
    bundle = bundle_of(run, quick=args.quick, command=command)
    show(bundle, console)
    if run.cells:
        show_cells(run.cells, console)
    if args.json:
        write(bundle, args.json)
    return 1 if any(result.failed for result in bundle.results) else 0


def parse_args(command: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="one rate, a few seconds of each part")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=[], metavar="PART")
    parser.add_argument("--json", type=Path, metavar="PATH", help="save the bundle as JSON")
    parser.add_argument("--rates", nargs="+", type=float, default=[], help="requests per second")
    parser.add_argument("--seconds", type=float, help="of goodput, per turn")
    parser.add_argument("--skip-install", action="store_true", help="use only what is installed")
    args = parser.parse_args(command)
    args.command = command
    return args


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(_main(parse_args(sys.argv[1:]))))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)
