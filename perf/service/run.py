"""Runs benchmarks one after the other into a bundle."""

import asyncio
import time
from datetime import UTC, datetime

from rich.console import Console

from perf.report.bundle import BenchResult, Bundle
from perf.report.machine import commit, describe_machine, versions
from perf.stack.context import Bench, Context, Skip


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
