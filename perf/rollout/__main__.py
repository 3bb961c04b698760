"""``python -m perf.rollout``: a rolling upgrade of workers, then of orchestrators, under load.

Real ``tidegate worker`` and ``tidegate serve`` processes get what a kubelet sends. Exits with 1
when a request that was accepted is lost, or somebody waits longer than the drain.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from rich.console import Console

from perf.report.command import begin, new_console, new_parser, status_of
from perf.rollout.clients import ClientRecord, Clients
from perf.rollout.pods import DRAIN_S, GRACE_S, Cluster

_LULL_S = 2.0
"""Seconds of load before and after each upgrade."""


async def play(cluster: Cluster, clients: Clients) -> dict[str, float]:
    """Upgrade both sides under load; seconds that each took."""
    took = {}
    await clients.start()
    for name, upgrade in (
        ("workers", cluster.upgrade_workers),
        ("orchestrators", cluster.upgrade_orchestrators),
    ):
        await asyncio.sleep(_LULL_S)
        begun = time.monotonic()
        await upgrade()
        took[name] = round(time.monotonic() - begun, 1)
    await asyncio.sleep(_LULL_S)
    await clients.stop()
    return took


def judge(record: ClientRecord, cluster: Cluster) -> list[str]:
    """Faults of the run, a line each."""
    faults = list(record.faults)
    faults += [f"{name} needed SIGKILL after {GRACE_S:g} s" for name in cluster.ended.killed]
    waits = {"an answer's start": record.longest_wait_s, "its next part": record.longest_silence_s}
    faults += [
        f"somebody waited {seconds:.1f} s for {what}, longer than the drain of {DRAIN_S:g} s"
        for what, seconds in waits.items()
        if seconds > DRAIN_S
    ]
    return faults


async def _main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--orchestrators", type=int, default=2)
    parser.add_argument("--engine", choices=("torch", "synthetic-paced"), default="synthetic-paced")
    args = parser.parse_args()
    recording = begin(parser, args, "perf.rollout", *sys.argv[1:])
    console = new_console()
    with TemporaryDirectory(prefix="tidegate-rollout-") as folder:
        cluster = Cluster(Path(folder), _worker_env(args))
        try:
            await cluster.start(args.workers, args.orchestrators)
            clients = Clients(cluster.endpoints, args.clients, args.seed)
            try:
                took = await play(cluster, clients)
            finally:
                await clients.close()
            await cluster.end()
        finally:
            cluster.kill()
    record, faults = clients.record, judge(clients.record, cluster)
    figures = {
        "seconds": took,
        "pods_ended_s": cluster.ended.seconds,
        "outcomes": dict(record.outcomes),
        "refusals": record.refusals,
        "longest_wait_s": round(record.longest_wait_s, 2),
        "longest_silence_s": round(record.longest_silence_s, 2),
        "drain_s": DRAIN_S,
        "faults": faults,
    }
    _show(figures, console)
    recording.save(recording.facts() | {"engine": args.engine} | figures)
    return int(bool(faults))


def _worker_env(args: argparse.Namespace) -> dict[str, str]:
    return {
        "TIDEGATE_WORKER__DEVICE": "cpu",
        "TIDEGATE_WORKER__ENGINE": args.engine,
        "TIDEGATE_WORKER__DETERMINISTIC": "true",
    }


def _show(figures: dict[str, object], console: Console) -> None:
    for name, value in figures.items():
        console.print(f"{name}: {value}", markup=False)


if __name__ == "__main__":
    sys.exit(status_of(_main()))
