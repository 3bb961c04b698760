"""``make bench``: every figure that the README quotes, measured in one run on one machine.

    python -m perf.bench [--quick] [--only NAME …] [--json PATH] [--device cpu|cuda]

Starts what it needs on free loopback ports and ends it again, also when it is interrupted. The
exit status is 1 when a benchmark failed; one that cannot run here is skipped with its reason.
"""

import argparse
import asyncio
import shlex
import signal
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from perf.benches import BENCHES
from perf.bundle import BenchResult, Bundle, write
from perf.context import Bench, Context, Skip
from perf.machine import commit, describe_machine, versions
from perf.table import show


async def run_all(
    benches: list[Bench], *, quick: bool, device: str, command: str, console: Console
) -> Bundle:
    """Run one after the other; a failure is a result too."""
    machine = describe_machine()
    results = []
    async with Context(quick=quick, device=device) as context:
        for bench in benches:
            console.print(f"{bench.name}: {bench.what} …", style="dim")
            results.append(await _run_one(bench, context))
        card = context.card
        found = versions() | ({"triton": context.triton_version} if context.triton_version else {})
    return Bundle(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        commit=commit(),
        quick=quick,
        machine=machine,
        versions=found,
        engine=f"{card.engine} {card.engine_version}" if card else "none",
        engine_digest=card.engine_digest if card else "",
        model=card.model if card else "none",
        model_digest=card.model_digest if card else "",
        results=results,
    )


async def _run_one(bench: Bench, context: Context) -> BenchResult:
    begun = time.monotonic()
    figures, skipped, failed = [], "", ""
    limit = asyncio.timeout(bench.limit_s)
    try:
        async with limit:
            figures = await bench.run(context)
    except Skip as reason:
        skipped = str(reason)
    except Exception as error:  # whatever it is, the other benchmarks still run
        failed = f"not done after {bench.limit_s:g} s" if limit.expired() else _reason(error)
    seconds = round(time.monotonic() - begun, 1)
    return BenchResult(bench.name, bench.what, seconds, figures, skipped, failed)


def _reason(error: Exception) -> str:
    if isinstance(error, ExceptionGroup):
        return "; ".join(_reason(each) for each in error.exceptions)
    return f"{type(error).__name__}: {error}"


async def _main(args: argparse.Namespace) -> int:
    task = asyncio.current_task()
    assert task is not None
    # SIGINT is asyncio's own; this makes SIGTERM end what was started too.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
    chosen = [
        bench
        for bench in BENCHES
        if (bench.name in args.only if args.only else bench.in_quick or not args.quick)
    ]
    bundle = await run_all(
        chosen,
        quick=args.quick,
        device=args.device,
        command=shlex.join(["python", "-m", "perf.bench", *sys.argv[1:]]),
        console=console,
    )
    show(bundle, console)
    if args.json:
        write(bundle, args.json)
    return 1 if any(result.failed for result in bundle.results) else 0


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [bench.name for bench in BENCHES]
    parser.add_argument("--quick", action="store_true", help="a minute at most, fewer samples")
    parser.add_argument("--only", nargs="+", choices=names, default=[], metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="PATH", help="save the bundle as JSON")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the engine")
    return parser.parse_args()


if __name__ == "__main__":
    try:
        sys.exit(asyncio.run(_main(parse_args())))
    except (KeyboardInterrupt, asyncio.CancelledError):
        sys.exit(130)
