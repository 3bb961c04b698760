"""The command: a run without Triton, failures and skips as results, nothing left behind."""

import asyncio
import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from perf.report.bundle import Figure, read
from perf.report.command import Skip
from perf.report.recording import Recording
from perf.service import run_all
from perf.stack.context import Bench, BenchContext


async def _fine(_: BenchContext) -> list[Figure]:
    return [Figure.of("k", "label", "ms", [1.0])]


async def _skips(_: BenchContext) -> list[Figure]:
    raise Skip("no such thing here")


async def _breaks(_: BenchContext) -> list[Figure]:
    raise ValueError("oh")


async def _hangs(_: BenchContext) -> list[Figure]:
    await asyncio.Event().wait()
    raise AssertionError


async def test_one_benchmark_that_fails_costs_only_itself() -> None:
    benches = [
        Bench(run.__name__, "what", run, limit_s=limit)
        for run, limit in (
            (_breaks, 9.0),
            (_hangs, 0.01),
            (_skips, 9.0),
            (_fine, 9.0),
        )
    ]
    console = Console(file=io.StringIO())
    recording = Recording.begin(["perf.service"])
    bundle = await run_all(benches, recording, quick=True, device="cpu", console=console)
    broken, hung, skipped, fine = bundle.results
    assert broken.failed == "ValueError: oh"
    assert hung.failed == "not done after 0.01 s"
    assert (skipped.skipped, skipped.failed) == ("no such thing here", "")
    assert fine.figures
    assert not fine.failed


@pytest.mark.slow
async def test_the_command_saves_its_bundle(tmp_path: Path) -> None:
    """PF-6, on the one benchmark that needs no server; DL-4: a look costs less than 1 µs."""
    path = tmp_path / "bundle.json"
    arguments = ["--quick", "--only", "deadline", "--json", str(path), "--allow-dirty"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "perf.service", *arguments, stdout=asyncio.subprocess.PIPE
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert "look at deadline" in output.decode()
    bundle = await asyncio.to_thread(read, path)
    assert bundle.quick
    assert "perf.service --quick" in bundle.command
    assert bundle.figures()["deadline.check_us"].n == 10
