"""Benchmarks in the order of execution; those that share a stack are together."""

from collections.abc import Sequence

from rich.console import Console

from perf.report.bundle import BenchResult, Bundle
from perf.report.command import result, within
from perf.report.recording import Recording
from perf.service import (
    admission,
    agents,
    cancel,
    deadline,
    emitter,
    health,
    promises,
    relay,
    starts,
    ttft,
)
from perf.stack.context import Bench, BenchContext

BENCHES: tuple[Bench, ...] = (
    deadline.BENCH,
    emitter.BENCH,
    ttft.BENCH,
    relay.BENCH,
    health.BENCH,
    relay.SINGLE,
    relay.PACED,
    promises.OVERTAKING,
    promises.FLOOD,
    cancel.BENCH,
    admission.BENCH,
    agents.BENCH,
    starts.BENCH,
)


async def run_all(
    benches: Sequence[Bench], recording: Recording, *, quick: bool, device: str, console: Console
) -> Bundle:
    """Run ``benches`` into a bundle; a failure is a result too."""
    results: list[BenchResult] = []
    async with BenchContext(quick=quick, device=device) as context:
        for bench in benches:
            console.print(f"{bench.name}: {bench.what} …", style="dim")
            with result(results, bench.name, bench.what) as figures:
                figures += await within(bench.limit_s, bench.run(context))
        triton = {"triton": context.triton_version} if context.triton_version else {}
        return recording.bundle(results, context.card, quick=quick, more_versions=triton)
