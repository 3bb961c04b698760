"""Processes that outlive those who started them: found again, ended, and nothing left (PV-1)."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from catalog.errors import StartFailed
from pool.process.proc import ProcessId
from pool.process.process import GuardedProcess, Label, clear_remains, find_detached, new_mark
from tests.support.processes import Marked, eventually

SLEEP = ("bash", "-c", "sleep 1000 & sleep 1000")


class Home:
    """A pool's folder, and what runs in its name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.marked = Marked()
        self.outlives = True
        (path / "run").mkdir()

    async def start(
        self, *command: str, unit: str = "one", log: Path | None = None
    ) -> GuardedProcess:
        home = str(self.path) if self.outlives else ""
        label = Label(unit, new_mark(), home, {"port": "8001"})
        return await GuardedProcess.start(label, command or SLEEP, self.marked.env, log)

    def nothing_is_left(self) -> None:
        self.marked.wait_gone(set())
        assert find_detached(self.path) == []
        assert list((self.path / "run").iterdir()) == []


@pytest.fixture
async def home(tmp_path: Path) -> AsyncIterator[Home]:
    home = Home(tmp_path)
    yield home
    for pid in home.marked.pids():
        os.kill(pid, signal.SIGKILL)


async def test_it_is_found_by_its_label_and_ended_by_who_adopts_it(home: Home) -> None:
    await home.start()
    assert find_detached(home.path / "other") == []
    (found,) = find_detached(home.path)
    assert (found.label.unit, found.label.facts) == ("one", {"port": "8001"})
    adopted = await GuardedProcess.adopt(found, None)
    assert adopted.running and ProcessId.of(adopted.pid) is not None
    assert await adopted.end(5.0) == 128 + signal.SIGTERM
    home.nothing_is_left()


async def test_a_command_that_cannot_run_is_a_failed_start(home: Home, tmp_path: Path) -> None:
    with pytest.raises(StartFailed, match="one: cannot run /nonexistent"):
        await home.start("/nonexistent", log=tmp_path / "log")
    assert "No such file" in (tmp_path / "log").read_text()
    home.nothing_is_left()


@pytest.mark.parametrize("outlives", [True, False])
@pytest.mark.parametrize("victim", ["command", "guardian"])
async def test_who_is_killed_nothing_is_left(home: Home, victim: str, outlives: bool) -> None:
    home.outlives = outlives
    process = await home.start()
    region = f"{process.found.label.mark}region"
    if victim == "guardian":  # any other removes it by itself
        os.close(os.open(f"/dev/shm/{region}", os.O_CREAT))
    pids = {"command": process.pid, "guardian": process.found.guardian.pid}
    os.kill(pids[victim], signal.SIGKILL)
    assert await process.wait() == 128 + signal.SIGKILL
    home.marked.wait_gone({region})
    home.nothing_is_left()


async def test_a_guardian_that_stands_still_is_ended_all_the_same(home: Home) -> None:
    process = await home.start()
    os.kill(process.found.guardian.pid, signal.SIGSTOP)
    assert await process.kill() == 128 + signal.SIGKILL
    home.nothing_is_left()


async def test_remains_of_a_run_without_a_guardian_are_ended(home: Home) -> None:
    """Both were killed while nobody watched: strays are told by their environment."""
    process = await home.start("bash", "-c", "setsid sleep 1000 & exec sleep 1000")
    eventually(lambda: len(home.marked.pids()) == 3, lambda: f"{home.marked.pids()}")
    process._ended.cancel()  # as if this manager was gone
    process.found.guardian.send(signal.SIGKILL)
    eventually(lambda: len(home.marked.pids()) == 1, lambda: f"{home.marked.pids()}")
    clear_remains(home.path, find_detached(home.path))
    home.nothing_is_left()


async def test_a_cancelled_start_leaves_nothing(home: Home) -> None:
    starting = asyncio.create_task(home.start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    home.nothing_is_left()


def test_a_process_id_that_was_given_away_again_gets_no_signal() -> None:
    ours = ProcessId.of(os.getpid())
    assert ours is not None and ours.is_running
    earlier = ProcessId(ours.pid, ours.started_ticks - 1)
    assert not earlier.is_running
    assert not earlier.send(signal.SIGKILL), "or this test has just ended"


async def test_another_users_processes_are_never_ours(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service that adopts one sends clients' prompts to its ports."""
    process = await home.start()
    with monkeypatch.context() as patched:
        patched.setattr(os, "geteuid", lambda: 4_000_000)
        assert find_detached(home.path) == []
    await process.kill()


@pytest.mark.parametrize("mark", ["../../victim", "", "*", "tidegate_000000000000_/../../x"])
async def test_a_mark_that_would_leave_its_folder_is_no_mark(home: Home, mark: str) -> None:
    """What it names is deleted at the end."""
    label = json.dumps({"home": str(home.path), "unit": "one", "mark": mark})
    process = subprocess.Popen(  # noqa: ASYNC220
        ["bash", "-c", "read", "guardian.py", f"--label={label}"],
        stdin=subprocess.PIPE,
        env=home.marked.env,
    )
    try:
        assert find_detached(home.path) == []
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()
