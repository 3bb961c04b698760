"""A launch on real Tritons with tiny models: starting, giving up, ending (PV-1, OR-14)."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from catalog.engines import EngineCatalog
from catalog.errors import GaveUp, StartFailed, StateFileUnusable
from catalog.paths import state_dir
from pool.engines import ensure
from pool.engines.triton import TritonInstall, TritonPorts, find_triton
from pool.events import EventKind, PoolEvent
from pool.fleet.specs import LaunchSpec
from pool.launcher import PoolLaunch
from pool.process import ports
from pool.process.ports import free_ports
from pool.supervise import RestartPolicy
from tests.support.processes import Marked
from tests.support.triton_models import NEVER_FINALIZES, QUIET, REFUSES_TO_LOAD, write_model

pytestmark = pytest.mark.e2e


class Launched:
    """A launcher in a task, its events in a queue."""

    def __init__(self, spec: LaunchSpec) -> None:
        self.events: asyncio.Queue[PoolEvent] = asyncio.Queue()
        self.stop = asyncio.Event()
        self.launcher = PoolLaunch(spec, self.events.put_nowait)
        self.task = asyncio.create_task(self.launcher.run(self.stop))

    async def until(self, kind: EventKind) -> PoolEvent:
        """The next event of ``kind``; raises what the launcher raised instead."""
        while True:
            getting = asyncio.create_task(self.events.get())
            await asyncio.wait([getting, self.task], return_when=asyncio.FIRST_COMPLETED)
            if not getting.done():
                getting.cancel()
                await self.task
                raise AssertionError(f"ended without {kind}")
            if getting.result().kind is kind:
                return getting.result()

    def seen(self) -> list[PoolEvent]:
        """The events that nobody waited for."""
        return [self.events.get_nowait() for _ in range(self.events.qsize())]

    @property
    def server_pid(self) -> int:
        """Of the first Triton."""
        pid = self.launcher.instances[0].describe()["pid"]
        assert isinstance(pid, int)
        return pid

    async def end(self) -> None:
        self.stop.set()
        await self.task


class Launch:
    """Starts launchers of one test; its ``wait_gone`` proves that nothing is left of any."""

    def __init__(self, tmp_path: Path) -> None:
        self.marked = Marked()
        self._tmp_path = tmp_path
        self._launched: list[Launched] = []

    def __call__(self, source: str = QUIET, **changes: Any) -> Launched:
        models = self._tmp_path / f"models-{len(self._launched)}"
        spec = LaunchSpec(
            worker_env=self.marked.mark,
            serve=False,
            model_repository=write_model(models, "tiny", source),
            models=("tiny",),
            load_timeout_s=60.0,
            log_to_stderr=True,
            restart=RestartPolicy(first_delay_s=0.0, max_delay_s=0.0, max_failures=2),
            state_file=self._tmp_path / "state.json",
        )
        launched = Launched(replace(spec, **changes))
        self._launched.append(launched)
        return launched

    async def close(self) -> None:
        for each in self._launched:
            each.stop.set()
            each.launcher.kill()
            await asyncio.gather(each.task, return_exceptions=True)


@pytest.fixture
async def launch(tmp_path: Path) -> AsyncIterator[Launch]:
    launch = Launch(tmp_path)
    yield launch
    await launch.close()
    launch.marked.wait_gone(set())


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> TritonInstall:
    """This machine's server is found from any state folder."""
    install = find_triton(None, state_dir())
    monkeypatch.setattr(ensure, "find_triton", lambda *_: install)
    return install


async def test_serves_until_told_to_stop(
    launch: Launch, tmp_path: Path, found: TritonInstall
) -> None:
    """Two instances, at the ports that were set for the first and ten above them; the server is in
    the catalog of engines."""
    http, grpc, metrics = free_ports(3)
    ports = TritonPorts(http, grpc, metrics)
    launched = launch(instances=2, triton_ports=ports, home=tmp_path)
    serving = await launched.until(EventKind.SERVING)
    assert [each.ports.grpc for each in launched.launcher.instances] == [grpc, grpc + 10]
    regions = launch.marked.regions()
    assert len(regions) == 2
    state = json.loads((tmp_path / "state.json").read_text())
    assert state["url"] == serving.text
    assert [each["name"] for each in state["instances"]] == ["triton-0", "triton-1"]
    while not (entries := EngineCatalog(tmp_path).entries()):  # noqa: ASYNC110 - a thread writes it
        await asyncio.sleep(0.01)
    assert [(each.engine, each.version) for each in entries] == [("triton", found.version)]
    await launched.end()
    launch.marked.wait_gone(regions)
    assert not (tmp_path / "state.json").exists()


@pytest.mark.parametrize("place", ["missing/state.json", "file/state.json", "directory"])
async def test_a_state_file_that_cannot_be_is_refused_at_once(
    launch: Launch, tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "directory").mkdir()
    launched = launch(state_file=tmp_path / place)
    with pytest.raises(StateFileUnusable, match=r"cannot write the state file .*--state-file PATH"):
        await launched.task
    assert launched.seen() == []


def test_clips_have_a_triton_of_their_own_behind_an_orchestrator() -> None:
    """The process of one model takes its Triton with it, and every other model there."""
    asked = LaunchSpec(models=("llm", "slot"), instances=2, triton_ports=TritonPorts(7000, 0, 0))
    text, clips = ("llm",), ("slot",)
    for spec, served in (
        (asked, {"triton-0": text, "triton-1": text, "slots-0": clips, "slots-1": clips}),
        (replace(asked, serve=False), dict.fromkeys(("triton-0", "triton-1"), ("llm", "slot"))),
    ):
        made = spec.instance_specs
        assert {each.name: each.models for each in made} == served
        above = [10 * place for place in range(len(made))]
        assert [each.ports.http - 7000 for each in made] == above


@pytest.mark.slow
async def test_another_port_when_one_was_taken_meanwhile(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = holder.getsockname()[1]
        choices = [[free_ports(1)[0], taken, free_ports(1)[0]], free_ports(3)]
        monkeypatch.setattr(ports, "free_ports", lambda n, *_: choices.pop(0) if n else [])
        launched = launch()
        assert "another program took a port" in (await launched.until(EventKind.LOST)).text
        await launched.until(EventKind.SERVING)


def test_a_port_that_was_asked_for_is_no_other_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of ours that listen on one port would be found out seconds later, or never."""
    asked, grpc, *free = free_ports(7)
    monkeypatch.setattr(ports.random, "sample", lambda *_, **__: [grpc, asked, *free])
    spec = LaunchSpec(port=asked, triton_ports=TritonPorts(0, grpc, 0))
    (placed,) = PoolLaunch(spec, print)._with_ports(spec.instance_specs, {asked})
    assert placed.ports == TritonPorts(free[0], grpc, free[1])


async def test_a_first_start_that_fails_is_not_repeated(launch: Launch, tmp_path: Path) -> None:
    launched = launch(REFUSES_TO_LOAD, log_to_stderr=False, home=state_dir())
    with pytest.raises(StartFailed, match="model tiny: ValueError: the model is missing"):
        await launched.task
    kinds = [event.kind for event in launched.seen()]
    assert EventKind.SERVING not in kinds and kinds[-1] is EventKind.ENDED


@pytest.mark.slow
async def test_an_instance_is_given_up_alone(launch: Launch, tmp_path: Path) -> None:
    launched = launch(instances=2)
    await launched.until(EventKind.SERVING)
    first, second = launched.launcher.instances
    kept = second.describe()["pid"]
    for _ in range(2):
        os.kill(launched.server_pid, signal.SIGKILL)
        await launched.until(EventKind.READY)
    os.kill(launched.server_pid, signal.SIGKILL)
    told = await launched.until(EventKind.WARNED)
    assert told.target == first.name and "failed 3 times in a row" in told.text
    assert "still running: triton-1" in told.text and not launched.task.done()
    assert second.describe()["pid"] == kept
    state = json.loads((tmp_path / "state.json").read_text())
    assert [each["pid"] for each in state["instances"]] == [None, kept]
    with pytest.raises(GaveUp, match="triton-1 failed 3 times in a row"):
        while True:
            os.kill(second.describe()["pid"], signal.SIGKILL)
            await launched.until(EventKind.READY)


async def test_a_second_signal_cuts_the_end_short(launch: Launch) -> None:
    launched = launch(NEVER_FINALIZES, drain_s=1000.0)
    await launched.until(EventKind.SERVING)
    launched.stop.set()
    await launched.until(EventKind.ENDING)
    launched.launcher.kill()
    await launched.task
