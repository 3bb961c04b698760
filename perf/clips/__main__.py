"""``make bench-slot``: clips per minute, their stages, memory.

    python -m perf.clips [--quick] [--json PATH]
    python -m perf.clips --soak 3600 [--json PATH]       make soak-slot

Starts a Triton on free loopback ports and ends it again. The exit status is 1 when a benchmark
failed, something grew or an answer was wrong.
"""

import asyncio
import itertools
import sys
import time
from typing import Any, Final, NamedTuple

from perf.clips import soak
from perf.clips.client import ClipClient, ClipReply, ClipRequest
from perf.clips.stack import ClipServer, ClipSpec, serving
from perf.load.usage import ServerUsage, cpu_s
from perf.report.bundle import BenchResult, Bundle, Figure
from perf.report.command import begin, new_console, new_parser, result, status_of, within
from perf.report.recording import Recording
from perf.report.table import show

SPEC: Final = ClipSpec(
    size=128,
    seconds=6.0,
    buffer_s=0.2,
    more={"OMP_NUM_THREADS": "1"},
    constants={"clips.render.stage_runner.NICE": 0},  # clips want the cores as much as anybody
)
"""Settings of the model. One thread for each stage: torch's own choice is a thread for each core,
and on cores that have other work too these wait for each other."""
LEVELS: Final = (1, 4)
_WARM_UP: Final = 10
"""Number of clips to warm up: as many as predictions want, and more."""
_TEXT: Final = "Good morning to everybody, the tide turns at six."
_STAGES: Final = {"audio": "speech", "image": "portrait", "video": "video", "clip": "check"}


class ClipTurn(NamedTuple):
    """Clips that were rendered for some clients in a turn."""

    replies: list[ClipReply]
    per_minute: float
    cpu_per_clip_s: float


def recipe_of(text: str = _TEXT, *, size: int = 0, fps: int = 24) -> dict[str, Any]:
    return {"schema": "1.0", "text": text, "video": {"fps": fps, "size": size}}


async def closed_loop(client: ClipClient, pid: int, clients: int, clips: int) -> ClipTurn:
    """Have ``clips`` rendered by ``clients`` in all. Raises ``RuntimeError`` when one fails."""
    left, replies = itertools.count(), list[ClipReply]()

    async def one() -> None:
        while next(left) < clips:
            reply = await client.render(ClipRequest(recipe_of()))
            if not reply.is_clip:
                raise RuntimeError(reply.error)
            replies.append(reply)

    used_s, begun = cpu_s(pid), time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(one())
    seconds = time.monotonic() - begun
    return ClipTurn(replies, 60 * clips / seconds, (cpu_s(pid) - used_s) / clips)


async def run(server: ClipServer, *, quick: bool) -> list[Figure]:
    rounds, clips = (2, 4) if quick else (6, 12)
    turns: dict[int, list[ClipTurn]] = {clients: [] for clients in LEVELS}
    async with ClipClient(server.grpc_address) as client:
        await closed_loop(client, server.pid, 1, _WARM_UP)
        before = ServerUsage.of(server.pid).rss_mib
        for _ in range(rounds):
            for clients, into in turns.items():
                into.append(await closed_loop(client, server.pid, clients, clips))
        after = ServerUsage.of(server.pid).rss_mib
    figures, of = [], Figure.of
    for clients, its in turns.items():
        label = f"{clients} at once" if clients > 1 else "one at a time"
        key = f"throughput.ours.{clients}"
        latencies = [1000 * reply.latency_s for turn in its for reply in turn.replies]
        rates = [turn.per_minute for turn in its]
        cpu = [turn.cpu_per_clip_s for turn in its]
        figures += [
            of(f"{key}.per_minute", f"{label}: clips per minute", "", rates, better="higher"),
            of(f"{key}.latency_ms", f"{label}: a clip", "ms", latencies, spread="p5–p95"),
            of(f"{key}.cpu_s", f"{label}: CPU per clip", "s", cpu),
        ]
    figures += _stages([reply for turn in turns[1] for reply in turn.replies])
    made = sum(len(turn.replies) for its in turns.values() for turn in its)
    grown, label = 100 * (after - before) / made, f"growth per 100 clips, over {made}"
    return [
        *figures,
        of("memory.ours.rss_mib", "resident", "MiB", [after]),
        of("memory.ours.growth_mib", label, "MiB", [grown]),
    ]


def _stages(replies: list[ClipReply]) -> list[Figure]:
    figures = []
    for stage, label in _STAGES.items():
        values = [float(reply.facts[f"{stage}_ms"]) for reply in replies]
        figures += [
            Figure.tail_of(f"stage.{stage}.p{q}_ms", f"{label}, p{q}", "ms", values, q)
            for q in (50, 95, 99)
        ]
    rest = [1000 * reply.latency_s - float(reply.facts["total_ms"]) for reply in replies]
    label = "encoding, Triton and the way"
    return [*figures, Figure.of("stage.rest_ms", label, "ms", rest, spread="p5–p95")]


_LIMIT_S = 300.0


async def measure(recording: Recording, *, quick: bool) -> Bundle:
    """Measure; a failure is a result too."""
    results: list[BenchResult] = []
    versions = {}
    with result(results, "throughput", "clips per minute, stage times, memory") as figures:
        async with serving(SPEC) as server:
            versions = {"triton": server.triton_version}
            figures += await within(_LIMIT_S, run(server, quick=quick))
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
