"""Common parts of ``perf``'s commands: options, console, failures as results, exit status."""

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Awaitable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from perf.report.bundle import BenchResult, Figure
from perf.report.recording import RESULTS, DirtyTree, Recording


class Skip(Exception):
    """Raised where something cannot be measured; the message says why, for people."""


class TimeLimit(Exception):
    """Raised for something that was stopped before it was done."""


def new_parser(doc: str | None, *, saves: bool = True) -> argparse.ArgumentParser:
    """Parser with the module's docstring as its help; ``saves``: the command leaves a bundle."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if saves:
        parser.add_argument("--json", type=Path, metavar="PATH", help="save the bundle as JSON")
        told = f"save it although the checkout has changes, not in {RESULTS}"
        parser.add_argument("--allow-dirty", action="store_true", help=told)
    return parser


def begin(
    parser: argparse.ArgumentParser,
    args: argparse.Namespace,
    module: str,
    *given: str,
    seed: int | None = None,
) -> Recording:
    """The recording of ``python -m module given``; a usage error when it could not be saved.

    ``seed`` is that of a command without an option for it.
    """
    seed, allow_dirty = getattr(args, "seed", seed), args.allow_dirty
    try:
        return Recording.begin((module, *given), args.json, allow_dirty=allow_dirty, seed=seed)
    except DirtyTree as error:
        parser.error(str(error))


def new_console(width: int = 120) -> Console:
    """Console as wide as the terminal, or ``width`` characters in a file."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else width)


@contextmanager
def result(results: list[BenchResult], name: str, what: str) -> Iterator[list[Figure]]:
    """Gathers the figures of the body into a result; a failure is one too, and ends only it."""
    begun = time.monotonic()
    figures: list[Figure] = []
    skipped, failed = "", ""
    try:
        yield figures
    except Skip as reason:
        skipped = str(reason)
    except Exception as error:  # whatever it is, what else is measured continues
        failed = _reason(error)
    seconds = round(time.monotonic() - begun, 1)
    results.append(BenchResult(name, what, seconds, figures, skipped, failed))


async def within(limit_s: float, measured: Awaitable[list[Figure]]) -> list[Figure]:
    """Await figures for at most ``limit_s``. Raises ``TimeLimit``."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            return await measured
    except TimeoutError:
        if limit.expired():
            raise TimeLimit(f"not done after {limit_s:g} s") from None
        raise


def status_of(main: Coroutine[object, object, int]) -> int:
    """The exit status of ``main``: 130 when a signal interrupts it, behind its own cleaning up."""
    try:
        return asyncio.run(_interruptible(main))
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130


async def _interruptible(main: Coroutine[object, object, int]) -> int:
    task = asyncio.current_task()
    assert task is not None
    # SIGINT is asyncio's own; this makes SIGTERM end what was started too.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await main


def _reason(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_reason(each) for each in error.exceptions)
    return str(error) if isinstance(error, TimeLimit) else f"{type(error).__name__}: {error}"
