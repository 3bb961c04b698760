"""``make bench-slot``: clips, their stages, memory; for an hour (``make soak-slot``): its growth.

    python -m perf.clips [--seconds 60] [--json PATH]

Starts a Triton on free loopback ports, and ends it afterwards. The exit status is 1 if something
grew or an answer was wrong.
"""

import sys
import time

from perf.clips import soak
from perf.report.bundle import BenchResult
from perf.report.command import begin, new_console, new_parser, status_of
from perf.report.table import show


async def _main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of arrivals")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    recording = begin(parser, args, "perf.clips", *sys.argv[1:])
    begun = time.monotonic()
    figures, faults, triton = await soak.run(args.seconds, args.seed)
    what = "paced clips, cancels, mistakes and short deadlines"
    took_s = round(time.monotonic() - begun, 1)
    found = BenchResult("soak", what, took_s, figures, failed="; ".join(faults[:20]))
    bundle = recording.bundle([found], more_versions={"triton": triton})
    show(bundle, new_console())
    recording.save(bundle)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(status_of(_main()))
