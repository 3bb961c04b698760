"""``make bench-slot``: the slot pipeline beside a naive one with the same providers, in turns.

    python -m perf.clips [--quick] [--only NAME …] [--json PATH]
    python -m perf.clips --soak 3600 [--json PATH]       make soak-slot

Starts a Triton and two naive servers on free loopback ports and ends them again. The exit status
is 1 when a benchmark failed, something grew or an answer was wrong.
"""

import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from rich.console import Console

from perf.clips import aborts, copies, soak, throughput
from perf.clips.rig import SlotRig, rigged
from perf.report.bundle import BenchResult, Bundle, Figure
from perf.report.command import begin, new_console, new_parser, result, status_of, within
from perf.report.recording import Recording
from perf.report.table import show


@dataclass(frozen=True, slots=True)
class SlotBench:
    """One benchmark. ``limit_s`` bounds it. ``has_rig``: it wants the servers that take turns."""

    name: str
    what: str
    run: Callable[[SlotRig], Awaitable[list[Figure]]]
    limit_s: float
    has_rig: bool = True


BENCHES = (
    SlotBench("copies", "bytes copied and allocated per clip", copies.run, 60, has_rig=False),
    SlotBench("throughput", "clips per minute, stage times, memory", throughput.run, 300),
    SlotBench("aborts", "from a cancel to the next clip", aborts.run, 200, has_rig=False),
)


async def run_all(
    benches: Sequence[SlotBench], recording: Recording, *, quick: bool, console: Console
) -> Bundle:
    """Run ``benches`` into a bundle; a failure is a result too."""
    results: list[BenchResult] = []
    async with AsyncExitStack() as stack:
        rig = SlotRig(quick)
        if any(bench.has_rig for bench in benches):
            rig = await stack.enter_async_context(rigged(quick=quick))
        for bench in benches:
            console.print(f"{bench.name}: {bench.what} …", style="dim")
            with result(results, bench.name, bench.what) as figures:
                figures += await within(bench.limit_s, bench.run(rig))
        versions = {"triton": rig.triton_version} if rig.triton_version else {}
        return recording.bundle(results, quick=quick, more_versions=versions)


async def _soak(seconds: float, seed: int, recording: Recording) -> Bundle:
    begun = time.monotonic()
    figures, faults, triton = await soak.run(seconds, seed)
    what = "paced clips, cancels, mistakes and short deadlines"
    took_s = round(time.monotonic() - begun, 1)
    found = BenchResult("soak", what, took_s, figures, failed="; ".join(faults[:20]))
    return recording.bundle([found], more_versions={"triton": triton})


async def _main() -> int:
    parser = new_parser(__doc__)
    names = [bench.name for bench in BENCHES]
    parser.add_argument("--quick", action="store_true", help="a minute, fewer samples")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="this, and nothing else")
    parser.add_argument("--seed", type=int, default=1, help="of --soak")
    args = parser.parse_args()
    recording = begin(parser, args, "perf.clips", *sys.argv[1:])
    console = new_console()
    if args.soak:
        bundle = await _soak(args.soak, args.seed, recording)
    else:
        chosen = [bench for bench in BENCHES if bench.name in args.only]
        bundle = await run_all(chosen, recording, quick=args.quick, console=console)
    show(bundle, console)
    recording.save(bundle)
    return int(any(each.failed for each in bundle.results))


if __name__ == "__main__":
    sys.exit(status_of(_main()))
