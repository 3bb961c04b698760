"""``make bench``: measures every figure of the README in one run on one machine.

    python -m perf.service [--quick] [--only NAME …] [--json PATH] [--device cpu|cuda]

It starts its servers on free loopback ports, and ends them, even if it is interrupted. The exit
status is 1 if a benchmark failed. A benchmark that cannot run here is skipped with the reason.
"""

import sys

from perf import SEED
from perf.report.command import begin, new_console, new_parser, status_of
from perf.report.table import show
from perf.service import BENCHES, run_all


async def _main() -> int:
    parser = new_parser(__doc__)
    names = [bench.name for bench in BENCHES]
    parser.add_argument("--quick", action="store_true", help="a minute at most, fewer samples")
    parser.add_argument("--only", nargs="+", choices=names, default=[], metavar="NAME")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the engine")
    args = parser.parse_args()
    recording = begin(parser, args, "perf.service", *sys.argv[1:], seed=SEED)
    console = new_console()
    chosen = [
        bench
        for bench in BENCHES
        if (bench.name in args.only if args.only else bench.in_quick or not args.quick)
    ]
    bundle = await run_all(chosen, recording, quick=args.quick, device=args.device, console=console)
    show(bundle, console)
    recording.save(bundle)
    return int(any(result.failed for result in bundle.results))


if __name__ == "__main__":
    sys.exit(status_of(_main()))
