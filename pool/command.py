"""Runs a launch as a foreground command: handles signals, prints progress, sets an exit status."""

import asyncio
import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console

from catalog.errors import ProvisionError
from catalog.operator_key import access
from orchestrator.telemetry.narration import LAUNCH, narrated
from pool.events import EventKind, PoolEvent
from pool.fleet.specs import LaunchSpec
from pool.launcher import PoolLaunch
from pool.process.guardian import die_with_parent

View = Callable[[PoolEvent], None]
"""Receives the launcher's events."""
EXIT_FAILED = 1
EXIT_CUT_SHORT = 130


def run(spec: LaunchSpec, *, hint: str | None = None, follow_parent: bool = False) -> int:
    """Serve until SIGINT, SIGTERM or SIGHUP; a second one cuts the shutdown short. If the launch
    starts only orchestrators, SIGHUP makes them reload their settings.

    ``hint`` is shown once it serves (``open_view``). With ``follow_parent`` it also ends with its
    parent process. Returns 0 for a requested end, 1 for any other (with the reason on stderr), 130
    for one that was cut short.
    """
    if follow_parent:
        parent = os.getppid()
        die_with_parent(signal.SIGTERM)
        if os.getppid() != parent:  # the parent ended before the line above ran
            return EXIT_FAILED
    try:
        with open_view(Console(), hint) as view:
            return asyncio.run(_serve(spec, view))
    except ProvisionError as error:
        print(f"tidegate: {error}", file=sys.stderr)
        return EXIT_FAILED


async def _serve(spec: LaunchSpec, view: View) -> int:
    launcher = PoolLaunch(spec, view)
    stop = asyncio.Event()
    cut_short = False

    def on_signal() -> None:
        nonlocal cut_short
        if stop.is_set():
            cut_short = True
            launcher.kill()
        stop.set()

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGHUP, on_signal)
    loop.add_signal_handler(signal.SIGINT, on_signal)
    loop.add_signal_handler(signal.SIGTERM, on_signal)
    await launcher.run(stop)
    return EXIT_CUT_SHORT if cut_short else 0


_DOING = {"orchestrator": "starting, then waiting for lanes"}
_LOADING = "starting the server and loading the model"


def curl_line(url: str, body: Mapping[str, object], *, with_token: bool) -> str:
    """A request that works unchanged in any shell: some read the brackets of an IPv6 address as a
    pattern."""
    auth = '-H "authorization: Bearer $TIDEGATE_TOKEN" ' if with_token else ""
    return (
        f"curl -N '{url}' {auth}-H 'content-type: application/json' "
        f"-d {shlex.quote(json.dumps(body))}"
    )


@contextmanager
def open_view(console: Console, hint: str | None) -> Iterator[View]:
    """A view on ``console``. ``hint`` is printed once it serves, with ``{url}`` filled in.
    ``{key}`` becomes the page's key to operate the service, only on a terminal, because other
    people read logs.

    With ``TIDEGATE_TELEMETRY__LOG_FORMAT=json``, every line is an object, as in the orchestrator's
    log.
    """

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    if os.environ.get("TIDEGATE_TELEMETRY__LOG_FORMAT") == "json":
        yield lambda event: say(_entry(event))
    elif not console.is_terminal:
        yield lambda event: say(_line(event, hint))
    else:
        with console.status("starting") as spinner:

            def show(event: PoolEvent) -> None:
                if event.kind in (EventKind.SERVING, EventKind.ENDING):
                    spinner.stop()
                say(_line(event, hint, with_key=True))

            yield show


def _line(event: PoolEvent, hint: str | None, *, with_key: bool = False) -> str:
    """An event in words for a person."""
    match event.kind:
        case EventKind.STARTING:
            # Units of one kind have numbers.
            return f"{event.target}: {_DOING.get(event.target.partition('-')[0], _LOADING)}"
        case EventKind.READY:
            return f"{event.target}: {event.text}, ready after {event.seconds:.1f} s"
        case EventKind.LOST:
            return f"{event.target}: {event.text}; starting again in {event.seconds:.1f} s"
        case EventKind.SERVING:
            key = access(event.text).key if with_key and hint else ""
            told = (hint or "").replace("{key}", f"#key={key}" if key else "")
            serving = f"serving on {event.text} after {event.seconds:.1f} s"
            return "\n".join(filter(None, (serving, told.replace("{url}", event.text))))
        case EventKind.ENDING:
            return "ending"
        case EventKind.ENDED:
            return f"ended in {event.seconds:.1f} s, nothing left"
    return f"{event.target}: {event.text}"


def _entry(event: PoolEvent) -> str:
    """An event as a JSON object, for programs."""
    told = LAUNCH[event.kind]
    entry = {
        "level": "warning" if event.kind in (EventKind.LOST, EventKind.WARNED) else "info",
        "logger": "orchestrator.pool",
        "message": told.sentence,
        **narrated(told, event.target),
        "detail": event.text or None,
        "seconds": round(event.seconds, 3),
    }
    return json.dumps(entry, ensure_ascii=False)
