"""``make bench``: every figure that the README quotes, measured in one run on one machine.

    python -m perf.service [--quick] [--only NAME …] [--json PATH] [--device cpu|cuda]

Starts what it needs on free loopback ports and ends it again, also when it is interrupted. The
exit status is 1 when a benchmark failed; one that cannot run here is skipped with its reason.
"""

import argparse
import asyncio
import shlex
import signal
import sys
from pathlib import Path

from rich.console import Console

from perf.report.bundle import write
from perf.report.table import show
from perf.service import BENCHES
from perf.service.run import run_all


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
        command=shlex.join(["python", "-m", "perf.service", *sys.argv[1:]]),
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
