"""A client's time, and a real orchestrator in front of a fake worker."""

import asyncio
import os
import pty
import signal
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest

from pool import command
from pool.fleet.specs import LaunchSpec
from tests.orchestrator.conftest import make_service, make_worker, service, worker
from tidegate import _clock
from tidegate.cli.main import main

__all__ = ["FakeTime", "fake_time", "make_service", "make_worker", "service", "worker"]


class FakeTime:
    """Pauses take none of the test's time; it stands still otherwise."""

    def __init__(self) -> None:
        self.seconds = 1000.0
        self.pauses: list[float] = []

    def now(self) -> float:
        return self.seconds

    async def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.seconds += seconds


@pytest.fixture
def fake_time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    time = FakeTime()
    monkeypatch.setattr(_clock, "now", time.now)
    monkeypatch.setattr(_clock, "sleep", time.sleep)
    return time


Launched = list[tuple[LaunchSpec, str | None]]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """What ``tidegate up`` would launch, with its hint."""
    specs: Launched = []

    def launch(spec: LaunchSpec, *, hint: str | None, follow_parent: bool) -> int:
        specs.append((spec, hint))
        return 0

    monkeypatch.setattr(command, "run", launch)
    return specs


class Said(NamedTuple):
    out: str
    err: str


Cli = Callable[..., Said]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run ``tidegate``, which ends with this status; what it says."""

    def run(*argv: str, status: int = 0) -> Said:
        try:
            ended: object = main(argv)
        except SystemExit as end:
            ended = end.code
        said = Said(*capsys.readouterr())
        assert ended == status, said
        return said

    return run


async def in_terminal(*words: str, until: Callable[[bytes], bool]) -> tuple[int, bytes]:
    """Run ``tidegate`` in a terminal, and press Ctrl-C as soon as it shows ``until``; its exit
    status, and all that it has shown."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "30", "NO_COLOR": "1"}
    environment.pop("FORCE_COLOR", None)
    command = (sys.executable, "-m", "tidegate", *words)
    process = await asyncio.create_subprocess_exec(
        *command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    )
    os.close(theirs)
    shown = b""
    while not until(shown):
        shown += await asyncio.to_thread(os.read, ours, 65536)
    process.send_signal(signal.SIGINT)
    try:
        while data := await asyncio.to_thread(os.read, ours, 65536):
            shown += data
    except OSError:  # a terminal whose other side is gone
        pass
    os.close(ours)
    return await process.wait(), shown
