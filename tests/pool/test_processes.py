"""``tidegate serve --processes 2`` as a person runs it, in front of a fake worker (OR-18): one
port, any process will do, and one that is killed is replaced while the other continues."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from catalog.errors import MachineUnfit
from catalog.paths import ROOT
from pool.process.ports import free_ports
from pool.units.store import find_store
from tests.support.fake_worker import FakeWorker, Plan
from tests.support.processes import Marked
from tests.support.sse import read_events

pytestmark = pytest.mark.slow


class Port:
    """A running ``tidegate serve --processes``, as clients see it."""

    def __init__(self, port: int, marked: Marked, process: asyncio.subprocess.Process) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.process = process
        self._marked = marked

    def pids(self) -> dict[str, int]:
        """Process ids of the orchestrators, by their own addresses."""
        found = {}
        for pid in self._marked.pids():
            with suppress(OSError):
                command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                own = [e for e in environment if e.startswith(b"TIDEGATE_OWN_ADDRESS=")]
                if command[1:4] == [b"-P", b"-m", b"orchestrator"] and own:
                    found[own[0].decode().partition("=")[2]] = pid
        return found

    @asynccontextmanager
    async def at(self, process: str) -> AsyncIterator[aiohttp.ClientSession]:
        """A connection to the port that the process with that address of its own has accepted."""
        while True:
            connector = aiohttp.TCPConnector(limit=1)
            async with aiohttp.ClientSession(self.url, connector=connector) as http:
                if await self._process_of(http) == process:
                    yield http
                    return

    async def _process_of(self, http: aiohttp.ClientSession) -> str:
        with suppress(aiohttp.ClientError):
            async with http.get("/health") as response:
                return str((await response.json())["state"]["process"])
        return ""

    async def until(self, done: Callable[[Any], bool]) -> None:
        """Wait until some process's ``state`` in ``/health`` is as it should be."""
        while True:
            async with aiohttp.ClientSession() as http:  # another connection each time
                with suppress(aiohttp.ClientError):
                    async with http.get(f"{self.url}/health") as response:
                        if done((await response.json())["state"]):
                            return
            await asyncio.sleep(0.05)


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    fake = FakeWorker()
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def port(worker: FakeWorker, tmp_path: Path) -> AsyncIterator[Port]:
    try:
        find_store()
    except MachineUnfit as error:
        pytest.skip(str(error))
    marked, number = Marked(), free_ports(1)[0]
    environment = {
        **marked.env,
        "TIDEGATE_HOME": str(tmp_path),
        "TIDEGATE_JOURNAL__PATH": str(tmp_path / "journal"),
        "TIDEGATE_SHUTDOWN__GRACE_S": "1",
    }
    words = ("serve", "--processes", "2", "--port", str(number), "--instances-at", worker.address)
    with (tmp_path / "output").open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tidegate", *words),
            cwd=ROOT,
            env=environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
        )
    served = Port(number, marked, process)
    try:
        async with asyncio.timeout(60):
            await served.until(lambda state: state["processes"] == 2)
        yield served
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await process.wait() == 0
        await asyncio.to_thread(marked.wait_gone, set())
        assert not list((tmp_path / "operator").iterdir())
    finally:
        for pid in marked.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        print((tmp_path / "output").read_text())


async def submit(http: aiohttp.ClientSession, **task: object) -> str:
    body = {"model": "fake", "prompt": "hi", "max_tokens": 6, **task}
    async with http.post("/v2/tasks", json=body) as response:
        answer = await response.json()
        assert response.status == 202, answer
        return str(answer["task_id"])


async def ends_of(http: aiohttp.ClientSession, task_id: str) -> list[str]:
    """How each event that ends a task's stream says that it went."""
    async with http.get(f"/v2/tasks/{task_id}/events") as response:
        assert response.status == 200, await response.text()
        events = [event async for event in read_events(response)]
    ends = [event for event in events if event.event in ("end", "error")]
    return [event.json().get("outcome", event.data) for event in ends]


async def answer_of(http: aiohttp.ClientSession, path: str, done: Callable[[Any], bool]) -> Any:
    """The first answer that is as it should be. A connection made just before a kill may break."""
    while True:
        with suppress(aiohttp.ClientError):
            async with http.get(path) as response:
                if done(answer := await response.json()):
                    return answer
        await asyncio.sleep(0.05)


async def test_two_processes_at_a_port_serve_as_one_and_survive_each_other(
    port: Port, worker: FakeWorker, tmp_path: Path
) -> None:
    before = port.pids()
    assert len(before) == 2
    # Files and batches, and the journal's lock with them, are in one of them: that one is killed.
    lead_pid = int((tmp_path / "journal.lock").read_text())
    killed = next(own for own, pid in before.items() if pid == lead_pid)
    left = next(own for own in before if own != killed)
    async with port.at(killed) as one, port.at(left) as two:
        # Streams at both, side by side.
        body = {"model": "fake", "prompt": "hi", "max_tokens": 4, "stream": True}
        for http in (one, two):
            async with http.post("/v1/completions", json=body) as response:
                assert (await response.text()).count("data: ") >= 5
        # A cancel at one reaches the other.
        worker.plan = lambda job: Plan(stall_at=2)
        task_id = await submit(one)
        async with two.post(f"/v2/tasks/{task_id}/cancel") as response:
            assert response.status == 202
        assert await ends_of(two, task_id) == ["aborted"]
        # A file that comes to the one is in the other.
        form = aiohttp.FormData({"purpose": "batch"})
        form.add_field("file", b"{}\n", filename="requests.jsonl")
        async with two.post("/v1/files", data=form) as response:
            file_id = (await response.json())["id"]
        durable = await submit(one, durable=True, prompt="promised")
        async with one.get(f"/v2/tasks/{durable}/events") as stream:
            async for event in read_events(stream):
                if event.event == "token":
                    break
            worker.plan = lambda job: Plan()
            os.kill(before[killed], signal.SIGKILL)

        # The other continues, takes the promise over, and keeps it; once.
        path = f"/v2/tasks/{durable}"
        await answer_of(two, path, lambda answer: answer.get("status") == "ended")
        listed = await answer_of(two, "/v1/files", lambda answer: "data" in answer)
        assert [file["id"] for file in listed["data"]] == [file_id]
    await port.until(lambda state: state["process"] == killed and state["processes"] == 2)
    after = port.pids()
    assert after[left] == before[left] and after[killed] != before[killed]
    assert port.process.returncode is None
    async with port.at(killed) as one, port.at(left) as two:
        assert await ends_of(one, durable) == await ends_of(two, durable) == ["met"]
        async with one.get("/metrics") as response:
            page = await response.text()
    assert all(f'tidegate_state_members{{process="{own}"}}' in page for own in (killed, left))


async def test_or27_a_process_that_stands_still_is_replaced_and_holds_nobody_up(
    port: Port, worker: FakeWorker
) -> None:
    before = port.pids()
    stopped, left = before
    async with port.at(stopped) as one, port.at(left) as two:
        worker.plan = lambda job: Plan(stall_at=2)
        task_id = await submit(one, durable=True, prompt="promised")
        os.kill(before[stopped], signal.SIGSTOP)
        async with asyncio.timeout(20):  # three heartbeats of 15 s would take 45
            async with two.post(f"/v2/tasks/{task_id}/cancel") as response:
                assert response.status == 202, await response.text()
            assert await ends_of(two, task_id) == ["aborted"]
            while port.pids().get(stopped) in (None, before[stopped]):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
    await port.until(lambda state: state["process"] == stopped and state["processes"] == 2)
    assert port.pids()[left] == before[left]
