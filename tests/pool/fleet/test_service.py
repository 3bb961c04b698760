"""A manager's file followed and its orders taken; what it would start, said first (PV-1)."""

import asyncio
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from catalog.errors import PoolFileInvalid, PoolInUse, ProvisionError, StateFileUnusable
from pool import pool_command
from pool.events import EventKind, PoolEvent
from pool.fleet import service as service_module
from pool.fleet.home import PoolHome, ask
from pool.fleet.service import PoolService
from pool.process.ports import free_ports
from tests.support.fake_gpus import FakeGpus
from tests.support.fake_pool import FakeMachine, Server
from tests.support.steady_loop import hurry
from tidegate.cli.main import main

PATIENCE_S = 20.0
ONE = '[[instances]]\nname = "one"\nmodel = "demo"\n'


class Running:
    """A service over a simulated machine."""

    def __init__(self, folder: Path, machine: FakeMachine) -> None:
        self.folder = folder
        self.machine = machine
        self.path = folder / "pool.toml"
        self.home = folder / "home"
        self.events: list[PoolEvent] = []
        self.service: PoolService | None = None
        self.task: asyncio.Task[None] | None = None

    def ask_for(self, text: str, pool: str = "") -> None:
        self.path.write_text(f'[pool]\nhome = "{self.home}"\n{pool}\n{text}')

    async def start(self) -> PoolService:
        self.service = PoolService(self.path, FakeGpus(), self.events.append)
        self.task = asyncio.create_task(self.service.run())
        await self.until(lambda: self.service is not None and self.service.manager is not None)
        await self.until(lambda: self.ready() == self.asked())
        return self.service

    def asked(self) -> set[str]:
        assert self.service is not None
        return set(self.service._specs)

    def ready(self) -> set[str]:
        assert self.service is not None and self.service.manager is not None
        members = self.service.manager.members.items()
        return {name for name, member in members if member.is_ready}

    async def until(self, done: Any) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not done():
                if self.task is not None and self.task.done():
                    self.task.result()
                await asyncio.sleep(0.01)

    def said(self, kind: EventKind) -> list[str]:
        return [event.text for event in self.events if event.kind is kind]


@pytest.fixture
async def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    machine = FakeMachine()
    monkeypatch.setattr(service_module, "PoolMachine", lambda **_: machine)
    monkeypatch.setattr(service_module, "LOOK_S", 0.02)
    monkeypatch.setattr("tests.support.fake_pool.LOAD_S", 0.01)
    monkeypatch.delenv("TIDEGATE_LANES__TOKEN", raising=False)
    running = Running(tmp_path, machine)
    running.ask_for(ONE)
    hurry(4)  # the machine is in this process, too
    yield running
    if running.service is not None and running.task is not None:
        running.service.end(0.0)
        await asyncio.gather(running.task, return_exceptions=True)


async def test_status_says_how_each_instance_is(running: Running) -> None:
    await running.start()
    told = await ask(running.home, {"do": "status"}, PATIENCE_S)
    (one,) = told["instances"]
    assert (one["name"], one["state"], one["address"]) == ("one", "ready", "127.0.0.1:9001")


async def test_the_file_is_followed(running: Running) -> None:
    await running.start()
    running.ask_for(ONE + ONE.replace("one", "two"))
    await running.until(lambda: running.ready() == {"one", "two"})
    running.ask_for(ONE.replace("one", "two"))
    await running.until(lambda: running.ready() == {"two"} == set(running.machine.running()))


async def test_a_broken_file_changes_nothing_and_is_said(running: Running) -> None:
    service = await running.start()
    before = running.machine.running()
    running.path.write_text("[[instances]]\nnam = 1\n")
    await running.until(lambda: running.said(EventKind.REFUSED_FILE))
    assert "instances[0].nam: unknown key" in running.said(EventKind.REFUSED_FILE)[0]
    with pytest.raises(ProvisionError, match="nam: unknown key"):
        await ask(running.home, {"do": "reload"}, PATIENCE_S)
    running.path.unlink()
    with pytest.raises(PoolFileInvalid, match="cannot read"):
        service.reload()
    assert running.machine.running() == before
    assert running.ready() == {"one"}


async def test_a_reload_says_what_it_does_and_what_needs_a_restart(running: Running) -> None:
    await running.start()
    running.ask_for(ONE.replace("one", "two"), "heartbeat_s = 9")
    told = await ask(running.home, {"do": "reload"}, PATIENCE_S)
    assert told == {"start": ["two"], "replace": [], "end": ["one"]}
    assert "heartbeat_s in [pool]" in running.said(EventKind.WARNED)[0]
    await running.until(lambda: running.ready() == {"two"})


@pytest.mark.parametrize(("how", "left"), [("drain", 0), ("now", 0), ("leave", 1)])
async def test_stop_ends_everything_or_the_manager_alone(
    running: Running, how: str, left: int
) -> None:
    await running.start()
    assert await ask(running.home, {"do": "stop", "how": how}, PATIENCE_S) == {"ended": True}
    assert running.task is not None
    await running.task
    assert len(running.machine.running()) == left
    with pytest.raises(PoolInUse, match="no manager runs"):
        await ask(running.home, {"do": "status"}, PATIENCE_S)


async def test_its_metrics_are_on_loopback(running: Running) -> None:
    (port,) = free_ports(1)
    running.ask_for(ONE, f"metrics_port = {port}")
    await running.start()

    def scrape() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
            return str(response.read().decode())

    text = await asyncio.to_thread(scrape)
    for line in (
        'tidegate_pool_instances{state="ready"} 1.0',
        'tidegate_pool_instances{state="down"} 0.0',
        'tidegate_pool_restarts_total{name="one"} 0.0',
        "tidegate_preflight_cache_hit_rate 0.0",
    ):
        assert f"\n{line}\n" in text


async def test_a_lane_token_is_made_up_once_for_both_sides(running: Running) -> None:
    running.ask_for(ONE + "[orchestrator]\nport = 0\n")
    service = await running.start()
    assert service.manager is not None
    token = service.manager.state.lane_token
    assert len(token) > 30
    service.end(None)
    assert running.task is not None
    await running.task
    second = await running.start()
    assert second.manager is not None and second.manager.state.lane_token == token


async def test_a_folder_that_others_may_write_to_is_no_home(running: Running) -> None:
    """Its lock could be a link to anything, and its list of instances anybody's."""
    running.home.mkdir()
    running.home.chmod(0o777)
    service = PoolService(running.path, FakeGpus(), running.events.append)
    with pytest.raises(StateFileUnusable, match="other users may write"):
        await service.run()
    running.home.chmod(0o700)
    kept = running.folder / "kept"
    kept.write_text("kept")
    (running.home / "lock").symlink_to(kept)
    with pytest.raises(StateFileUnusable, match="cannot write"):
        await service.run()
    assert kept.read_text() == "kept"


async def test_an_order_of_nonsense_is_answered_and_only_its_owner_gives_any(
    running: Running,
) -> None:
    await running.start()
    control = running.home / "control"
    assert control.stat().st_mode & 0o777 == 0o600
    for order in (b"[" * 100_000, b"{}", b"[]", b"7", b"\xff", b'{"do": "dance"}'):
        reader, writer = await asyncio.open_unix_connection(str(control))
        writer.write(order + b"\n")
        assert b"no such order" in await reader.read()
        writer.close()


async def test_stop_ends_nothing_under_a_manager_that_starts(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the pool and answers nobody yet; what was ended it would start again."""
    found = Server("one", "d", "m", 1).found
    monkeypatch.setattr(pool_command, "find_detached", lambda home: [found])
    monkeypatch.setattr(pool_command, "_end", None)
    starting = PoolHome(running.home)
    starting.claim()
    with pytest.raises(PoolInUse, match="another manager"):
        await pool_command.stop(running.path, "drain")
    starting.release()


@pytest.mark.parametrize(
    ("url", "pool", "warns"),
    [
        ("http://10.255.255.1:8080", 'host = "0.0.0.0"\nopen = true', True),
        ("http://10.255.255.1:8080", 'advertise = "10.255.255.2"', False),
    ],
)
async def test_another_machine_that_would_be_told_our_loopback_is_said(
    running: Running, monkeypatch: pytest.MonkeyPatch, url: str, pool: str, warns: bool
) -> None:
    monkeypatch.setenv("TIDEGATE_LANES__TOKEN", "x" * 32)
    running.ask_for(ONE + f'[orchestrators]\nregister = ["{url}"]\n', pool)
    await running.start()
    said = [text for text in running.said(EventKind.WARNED) if "this machine can reach" in text]
    assert bool(said) == warns


def test_status_without_a_manager_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A script that watches a pool sees by the exit status that nobody restarts its instances."""
    monkeypatch.setenv("TIDEGATE_HOME", str(tmp_path))
    for options in ([], ["--json"]):
        assert main(["pool", "status", *options]) == 1
        assert "no manager runs" in capsys.readouterr().err
