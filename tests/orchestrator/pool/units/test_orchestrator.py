"""The orchestrator as a child process: what it waits for, and what it does not."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from orchestrator.pool.errors import StartFailed
from orchestrator.pool.launcher import Launcher
from orchestrator.pool.process.ports import free_ports
from orchestrator.pool.spec import EventKind, LaunchEvent, LaunchSpec
from orchestrator.pool.units.orchestrator import OrchestratorProcess
from tests.support.fake_worker import FakeWorker, make_card

StartInFront = Callable[..., Awaitable[OrchestratorProcess]]


@pytest.fixture
async def start(tmp_path: Path) -> AsyncIterator[StartInFront]:
    """An orchestrator in front of a worker whose card is ``make_card(**changes)``."""
    async with AsyncExitStack() as stack:

        async def start(**changes: object) -> OrchestratorProcess:
            worker = FakeWorker(make_card(**changes))
            await worker.start()
            stack.push_async_callback(worker.stop)
            process = OrchestratorProcess(
                "127.0.0.1",
                free_ports(1)[0],
                {"TIDEGATE_INSTANCES": worker.address, "TIDEGATE_TOKEN": ""},
                log=tmp_path / "orchestrator.log",
            )
            stack.push_async_callback(process.stop, 0.0)
            await process.start()
            return process

        yield start


async def test_a_model_that_can_never_be_served_is_not_waited_for(start: StartInFront) -> None:
    process = await start(tokenizer_json=b"{}")
    with pytest.raises(StartFailed, match=r"tokenizer of fake cannot be read: .+"):
        await process.wait_ready(3600.0)


async def test_what_is_not_served_is_told_when_the_rest_is_and_the_launcher_passes_it_on(
    start: StartInFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = await start(chat_template="{% nothing %}")
    (warning,) = await process.wait_ready(60.0)
    assert "chat template of fake cannot be read" in warning
    events: list[LaunchEvent] = []

    async def started() -> None:
        """It runs already."""

    monkeypatch.setattr(process, "start", started)
    await Launcher(LaunchSpec(load_timeout_s=60.0), events.append)._start(process)
    (warning,) = [event.text for event in events if event.kind is EventKind.WARNED]
    assert warning.endswith("'nothing'; plain prompts are served, chats are refused")


async def test_who_waits_in_vain_hears_what_for(tmp_path: Path) -> None:
    process = OrchestratorProcess(
        "127.0.0.1",
        free_ports(1)[0],
        {"TIDEGATE_INSTANCES": f"127.0.0.1:{free_ports(1)[0]}", "TIDEGATE_TOKEN": ""},
        log=tmp_path / "orchestrator.log",
    )
    try:
        await process.start()
        with pytest.raises(StartFailed, match=r"503 after 0 s\n127\.0\.0\.1:\d+: \w+"):
            await process.wait_ready(0.0)
    finally:
        await process.stop(0.0)
