"""What a person sees of a launch."""

import io
import json
import shlex
from pathlib import Path

import pytest
from rich.console import Console

from catalog.operator_key import keep_key, key_file
from pool.command import curl_line, open_view
from pool.events import EventKind, PoolEvent, pool_log
from tests.support.cases import for_each

RUN = [
    PoolEvent(EventKind.FOUND, "triton", "Triton 2.51.0 from the wheel"),
    PoolEvent(EventKind.STARTING, "triton"),
    PoolEvent(EventKind.STARTING, "orchestrator"),
    PoolEvent(EventKind.READY, "triton", "gRPC on 127.0.0.1:8001", 2.5),
    PoolEvent(EventKind.READY, "orchestrator", "HTTP on 127.0.0.1:9000", 2.75),
    PoolEvent(EventKind.SERVING, "tidegate", "http://127.0.0.1:9000", 2.8),
    PoolEvent(EventKind.LOST, "triton", "the server ended with status 137", 0.2),
    PoolEvent(EventKind.READY, "triton", "gRPC on 127.0.0.1:8001", 3.0),
    PoolEvent(EventKind.ENDING, "tidegate"),
    PoolEvent(EventKind.ENDED, "tidegate", seconds=1.2),
]


def shown(*, terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=60, color_system=None)
    with open_view(
        console, "in a browser: {url}/{key}\ntry it:\n  curl {url}/" + "x" * 100
    ) as view:
        for event in RUN:
            view(event)
    return out.getvalue()


def test_plain_lines_where_nobody_looks() -> None:
    assert shown(terminal=False).splitlines() == [
        "triton: Triton 2.51.0 from the wheel",
        "triton: starting the server and loading the model",
        "orchestrator: starting, then waiting for lanes",
        "triton: gRPC on 127.0.0.1:8001, ready after 2.5 s",
        "orchestrator: HTTP on 127.0.0.1:9000, ready after 2.8 s",
        "serving on http://127.0.0.1:9000 after 2.8 s",
        "in a browser: http://127.0.0.1:9000/",
        "try it:",
        "  curl http://127.0.0.1:9000/" + "x" * 100,
        "triton: the server ended with status 137; starting again in 0.2 s",
        "triton: gRPC on 127.0.0.1:8001, ready after 3.0 s",
        "ending",
        "ended in 1.2 s, nothing left",
    ]


def test_the_operators_key_is_shown_on_a_terminal_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader of a service manager's log may not operate the service."""
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path))
    key = keep_key(key_file(tmp_path, "127.0.0.1", 9000))
    assert f"in a browser: http://127.0.0.1:9000/#key={key}\n" in shown(terminal=True)
    assert "in a browser: http://127.0.0.1:9000/\n" in shown(terminal=False)


def test_programs_get_an_object_for_each_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the logger that the pool manager's own lines have, by which they are filtered."""
    monkeypatch.setenv("TIDEGATE_TELEMETRY__LOG_FORMAT", "json")
    entries = [json.loads(line) for line in shown(terminal=False).splitlines()]
    assert len(entries) == len(RUN)
    assert {entry["logger"] for entry in entries} == {"orchestrator.pool"} == {pool_log.name}
    assert [e["seconds"] for e in entries if e["level"] == "warning"] == [0.2]


def test_a_terminal_gets_the_same_under_a_spinner() -> None:
    text = shown(terminal=True)
    assert all(line in text for line in shown(terminal=False).splitlines())
    assert "starting" in text


@for_each("with_token", [False, True])
def test_the_curl_line_survives_a_shell(with_token: bool) -> None:
    words = shlex.split(curl_line("http://[::1]:1/v1", {"model": "it's"}, with_token=with_token))
    assert words[:3] == ["curl", "-N", "http://[::1]:1/v1"]
    assert json.loads(words[-1]) == {"model": "it's"}
    assert ("authorization: Bearer $TIDEGATE_TOKEN" in words) == with_token
