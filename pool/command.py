"""Runs a launch as a foreground command: signals in, progress and an exit status out."""

import asyncio
import os
import signal
import sys

from rich.console import Console

from catalog.errors import ProvisionError
from pool.console import View, open_view
from pool.launcher import Launcher
from pool.process.guardian import die_with_parent
from pool.spec import LaunchSpec

EXIT_FAILED = 1
EXIT_CUT_SHORT = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run(spec: LaunchSpec, *, hint: str | None = None, follow_parent: bool = False) -> int:
    """Serve until SIGINT, SIGTERM or SIGHUP; a second one cuts the end short. Where only
    orchestrators are started SIGHUP has these read their settings anew, as it does with one alone.

    ``hint`` is shown once it serves (``console.open_view``). With ``follow_parent`` it also ends
    with the process that started this one. Returns 0 for an end that was asked for, 1 for any other
    (with the reason on stderr), 130 for one that was cut short.
    """
    if follow_parent:
        parent = os.getppid()
        die_with_parent(signal.SIGTERM)
        if os.getppid() != parent:  # the parent ended before the line above took effect
            return EXIT_FAILED
    try:
        with open_view(Console(), hint) as view:
            return asyncio.run(_serve(spec, view))
    except ProvisionError as error:
        print(f"tidegate: {error}", file=sys.stderr)
        return EXIT_FAILED


async def _serve(spec: LaunchSpec, view: View) -> int:
    launcher = Launcher(spec, view)
    stop = asyncio.Event()
    cut_short, had_terminal = False, os.isatty(0)

    def on_signal() -> None:
        nonlocal cut_short
        if stop.is_set():
            cut_short = True
            launcher.kill()
        stop.set()

    def on_hangup() -> None:
        has_lost_terminal = had_terminal and not os.isatty(0)
        if spec.instances_at is None or has_lost_terminal:
            on_signal()
        else:
            launcher.reload()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, on_hangup)
    for signum in _SIGNALS:
        loop.add_signal_handler(signum, on_signal)
    await launcher.run(stop)
    return EXIT_CUT_SHORT if cut_short else 0
