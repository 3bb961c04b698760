"""``make soak-slot``: the slot model on the real Triton for an hour.

    python -m perf.slot --soak 3600 [--json PATH]

The exit status is 1 when something grew or an answer was wrong.
"""

import sys
import time

from perf.report.bundle import BenchResult
from perf.report.command import begin, new_console, new_parser, status_of
from perf.report.table import show
from perf.slot import soak


async def _main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--soak", type=float, required=True, metavar="SECONDS")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    recording = begin(parser, args, "perf.slot", *sys.argv[1:])
    console = new_console()
    begun = time.monotonic()
    figures, faults, triton = await soak.run(args.soak, args.seed)
    what = "paced clips, cancels, mistakes and short deadlines"
    seconds = round(time.monotonic() - begun, 1)
    result = BenchResult("soak", what, seconds, figures, failed="; ".join(faults[:20]))
    bundle = recording.bundle([result], more_versions={"triton": triton})
    show(bundle, console)
    recording.save(bundle)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(status_of(_main()))
