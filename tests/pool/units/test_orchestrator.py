"""The orchestrator as a child process: what it waits for, and what it does not."""

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from catalog.errors import StartFailed
from catalog.paths import ROOT
from pool.process.http_get import get
from pool.process.ports import free_ports
from pool.units import orchestrator as orchestrator_module
from pool.units.orchestrator import OrchestratorProcess
from tests.support.fake_worker import FakeWorker, make_card

SLOW_JOURNAL = """
import os, sqlite3, time

connect = sqlite3.connect

def connect_later(*args, **kwargs):
    while not os.path.exists({go_on!r}):
        time.sleep(0.01)
    return connect(*args, **kwargs)

sqlite3.connect = connect_later
"""
"""A journal is opened once that file is there."""


class InFront(OrchestratorProcess):
    """An orchestrator in front of a worker, with what it warned of."""

    def __init__(self, instances: str, log: Path, ready_within_s: float | None) -> None:
        self.warnings: list[str] = []
        super().__init__(
            "127.0.0.1",
            free_ports(1)[0],
            {"TIDEGATE_INSTANCES": instances, "TIDEGATE_TOKEN": ""},
            log=log,
            warn=self.warnings.append,
        )
        self.ready_within_s = ready_within_s


StartInFront = Callable[..., Awaitable[InFront]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[StartInFront]:
    """An orchestrator in front of a worker whose card is ``make_card(**changes)``."""
    async with AsyncExitStack() as stack:

        async def start(ready_within_s: float | None = None, **changes: object) -> InFront:
            worker = FakeWorker(make_card(**changes))
            await worker.start()
            stack.push_async_callback(worker.stop)
            process = InFront(worker.address, tmp_path / "orchestrator.log", ready_within_s)
            stack.push_async_callback(process.stop, 0.0)
            await process.start()
            return process

        yield start


async def test_a_model_that_can_never_be_served_is_not_waited_for(start: StartInFront) -> None:
    process = await start(tokenizer_json=b"{}")
    with pytest.raises(StartFailed, match=r"tokenizer of fake cannot be read: .+"):
        await process.wait_ready(3600.0)


@pytest.mark.slow
async def test_what_is_not_served_is_told_when_the_rest_is(start: StartInFront) -> None:
    process = await start(ready_within_s=60.0, chat_template="{% nothing %}")
    (warning,) = process.warnings
    assert "chat template of fake cannot be read" in warning
    assert warning.endswith("'nothing'; plain prompts are served, chats are refused")


@pytest.mark.slow
async def test_one_that_says_that_it_starts_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It opens a journal, which may take longer than a start that says nothing."""
    go_on, health_port = tmp_path / "go on", free_ports(1)[0]
    (tmp_path / "sitecustomize.py").write_text(SLOW_JOURNAL.format(go_on=str(go_on)))
    process = OrchestratorProcess(
        "127.0.0.1",
        free_ports(1)[0],
        {
            "TIDEGATE_INSTANCES": f"127.0.0.1:{free_ports(1)[0]}",
            "TIDEGATE_TOKEN": "",
            "TIDEGATE_JOURNAL__PATH": str(tmp_path / "journal"),
            "TIDEGATE_HEALTH__PORT": str(health_port),
            "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)]),
        },
        log=tmp_path / "orchestrator.log",
    )
    try:
        starting = asyncio.create_task(process.start())
        while (answer := await get("127.0.0.1", process.port, "/health/live"))[0] is None:
            assert not starting.done(), starting.result()
            await asyncio.sleep(0.02)
        assert answer == (200, b'{"status":"starting"}')
        async with asyncio.timeout(30.0):
            while (answer := await get("127.0.0.1", health_port, "/health/live"))[0] is None:  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        assert answer == (200, b'{"status":"starting"}')
        for path, said in (("/health/ready", b"starting"), ("/v1/models", b"not_ready")):
            status, body = await get("127.0.0.1", process.port, path)
            assert status == 503 and said in body
        hours = itertools.count(step=3600.0)
        monkeypatch.setattr(
            orchestrator_module, "time", SimpleNamespace(monotonic=lambda: next(hours))
        )
        with pytest.raises(TimeoutError):  # and not ``StartFailed``, whatever the clock says
            await asyncio.wait_for(process.resume(), 0.2)
        monkeypatch.undo()
        assert not starting.done()
        go_on.touch()
        await starting
        status, body = await get("127.0.0.1", process.port, "/health/live")
        assert (status, body) == (200, b'{"status":"live"}')
        # It serves, and has nothing to serve from: who waits in vain hears what for.
        with pytest.raises(
            StartFailed, match=r"503 to /health/ready after 0 s\n127\.0\.0\.1:\d+: \w+"
        ):
            await process.wait_ready(0.0)
    finally:
        await process.stop(0.0)
