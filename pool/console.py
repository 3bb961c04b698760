"""Shows a person how the service starts, runs and ends: live on a terminal, otherwise in lines."""

import json
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table

from catalog.operator_key import access
from orchestrator.telemetry.narration import LAUNCH, narrated
from pool.events import EventKind, PoolEvent

_DOING = {"orchestrator": "starting, then waiting for lanes", "store": "starting, with what it had"}
_LOADING = "starting the server and loading the model"


def _doing(unit: str) -> str:
    """What a unit does while it starts; those of a kind are numbered."""
    return _DOING.get(unit.partition("-")[0], _LOADING)


class View(Protocol):
    """Takes the launcher's events."""

    def __call__(self, event: PoolEvent) -> None: ...


def curl_line(url: str, model: str, *, with_token: bool) -> str:
    """A streaming request that works as it stands in any shell."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": "Tell me a story."}],
        "stream": True,
    }
    auth = '-H "authorization: Bearer $TIDEGATE_TOKEN" ' if with_token else ""
    return (
        f"curl -N {url}/v1/chat/completions {auth}-H 'content-type: application/json' "
        f"-d {shlex.quote(json.dumps(body))}"
    )


@contextmanager
def open_view(console: Console, hint: str | None) -> Iterator[View]:
    """A view on ``console``. ``hint`` is printed once it serves, with ``{url}`` filled in, and
    ``{key}`` with what the page needs to operate the service: on a terminal only, since others read
    logs.

    With ``TIDEGATE_TELEMETRY__LOG_FORMAT=json``, as in the orchestrator's log, every line is an
    object.
    """
    if os.environ.get("TIDEGATE_TELEMETRY__LOG_FORMAT") == "json":
        yield _JsonView(console)
    elif console.is_terminal:
        with _TerminalView(console, hint) as view:
            yield view
    else:
        yield _LineView(console, hint)


class _LineView:
    """One line per event, for logs and pipes."""

    _shows_key = False

    def __init__(self, console: Console, hint: str | None) -> None:
        self._console = console
        self._hint = hint

    def __call__(self, event: PoolEvent) -> None:
        match event.kind:
            case EventKind.FETCHING | EventKind.FOUND | EventKind.SIZED | EventKind.WARNED:
                self._say(f"{event.target}: {event.text}")
            case EventKind.STARTING:
                self._say(f"{event.target}: {_doing(event.target)}")
            case EventKind.READY:
                self._say(f"{event.target}: {event.text}, ready after {event.seconds:.1f} s")
            case EventKind.LOST:
                self._say(f"{event.target}: {event.text}; starting again in {event.seconds:.1f} s")
            case EventKind.SERVING:
                self._say(f"serving on {event.text} after {event.seconds:.1f} s")
                if self._hint:
                    # the brackets of an IPv6 address are a pattern to some shells
                    url = event.text.replace("[", r"\[").replace("]", r"\]")
                    key = access(event.text).key if self._shows_key else ""
                    hint = self._hint.replace("{key}", f"#key={key}" if key else "")
                    self._say(hint.replace("{url}", url))
            case EventKind.ENDING:
                self._say("ending")
            case EventKind.ENDED:
                self._say(f"ended in {event.seconds:.1f} s, nothing left")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class _JsonView:
    """One JSON object per event, for programs."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def __call__(self, event: PoolEvent) -> None:
        told = LAUNCH[event.kind]
        entry = {
            "level": "warning" if event.kind in (EventKind.LOST, EventKind.WARNED) else "info",
            "logger": "orchestrator.pool",
            "message": told.sentence,
            **narrated(told, event.target),
            "detail": event.text or None,
            "seconds": round(event.seconds, 3),
        }
        text = json.dumps(entry, ensure_ascii=False)
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class _TerminalView(_LineView):
    """Spinners with running seconds until it serves; lines from then on."""

    _shows_key = True

    def __init__(self, console: Console, hint: str | None) -> None:
        super().__init__(console, hint)
        self._rows: dict[str, _Row] = {}
        self._live = Live(get_renderable=self._table, console=console, refresh_per_second=10)

    def __enter__(self) -> "_TerminalView":
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def __call__(self, event: PoolEvent) -> None:
        if not self._live.is_started:
            super().__call__(event)
        elif event.kind is EventKind.STARTING:
            self._rows[event.target] = _Row(_doing(event.target))
        elif event.kind is EventKind.READY:
            self._rows[event.target].finish(event.text, event.seconds)
        else:
            if event.kind in (EventKind.SERVING, EventKind.ENDING):
                self._live.stop()
            super().__call__(event)

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 1))
        for name, row in self._rows.items():
            table.add_row(row.mark, name, row.text, f"{row.seconds:.1f} s")
        return table


class _Row:
    def __init__(self, doing: str) -> None:
        self.mark: Spinner | str = Spinner("dots")
        self.text = doing
        self._began = time.monotonic()
        self._took: float | None = None

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began if self._took is None else self._took

    def finish(self, text: str, seconds: float) -> None:
        self.mark, self.text, self._took = "✓", text, seconds
