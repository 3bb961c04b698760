"""``make bench-slot``: clips per minute, their stages, memory.

    python -m perf.clips [--quick] [--json PATH]
    python -m perf.clips --soak 3600 [--json PATH]       make soak-slot

Starts a Triton on free loopback ports and ends it again. The exit status is 1 when a benchmark
failed, something grew or an answer was wrong.
"""

import sys
import time

from perf.clips import soak, throughput
from perf.clips.stack import serving
from perf.report.bundle import BenchResult, Bundle
from perf.report.command import begin, new_console, new_parser, result, status_of, within
from perf.report.recording import Recording
from perf.report.table import show

_LIMIT_S = 300.0


async def measure(recording: Recording, *, quick: bool) -> Bundle:
    """Measure; a failure is a result too."""
    results: list[BenchResult] = []
    versions = {}
    with result(results, "throughput", "clips per minute, stage times, memory") as figures:
        async with serving(throughput.SPEC) as server:
            versions = {"triton": server.triton_version}
            figures += await within(_LIMIT_S, throughput.run(server, quick=quick))
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
    parser.add_argument("--quick", action="store_true", help="a minute, fewer samples")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="this, and nothing else")
    parser.add_argument("--seed", type=int, default=1, help="of --soak")
    args = parser.parse_args()
    recording = begin(parser, args, "perf.clips", *sys.argv[1:])
    if args.soak:
        bundle = await _soak(args.soak, args.seed, recording)
    else:
        bundle = await measure(recording, quick=args.quick)
    show(bundle, new_console())
    recording.save(bundle)
    return int(any(each.failed for each in bundle.results))


if __name__ == "__main__":
    sys.exit(status_of(_main()))
