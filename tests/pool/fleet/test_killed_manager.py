"""A manager killed with -9 at every step of a start: no twin, no forgotten process (PV-1)."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from catalog.paths import ROOT
from pool.fleet.home import PoolHome, PoolState
from pool.process.process import find_detached
from tests.support.killed_manager import SleeperMachine, manage
from tests.support.processes import Marked

STEPS = (
    "before-write-2",  # nothing was started
    "prepared",
    "spawned",
    "started",
    "before-write-5",
    "after-write-5",
)


class Pool:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.marked = Marked()

    def run(self, step: str) -> "subprocess.Popen[str]":
        """A manager that kills itself at ``step``."""
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.killed_manager", str(self.path), step],
            cwd=ROOT,
            env=self.marked.env,
            stdout=subprocess.PIPE,
            text=True,
        )


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Pool]:
    pool = Pool(tmp_path)
    yield pool
    for pid in pool.marked.pids():
        os.kill(pid, signal.SIGKILL)


async def next_manager(pool: Pool) -> None:
    """Have another one keep the pool and end it."""
    home = PoolHome(pool.path)
    home.claim()
    try:
        manager = await manage(home, SleeperMachine(home.path))
        found = find_detached(pool.path)
        assert len(found) == 1, f"twins: {found}"
        pid = manager.members["one"].unit.pid
        assert pid is not None
        # A guardian, the command and its child; of every process of an earlier run there is none.
        stray = set(pool.marked.pids()) - _family(found[0].guardian.pid)
        assert not stray, "nobody knows these"
        assert home.read(pytest.fail).instances["one"].pid == pid
        await manager.stop(1.0)
    finally:
        home.release()
    pool.marked.wait_gone(set())
    assert list((pool.path / "run").iterdir()) == []


def _family(pid: int) -> set[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {pid}.union(*(_family(int(child)) for child in children))


@pytest.mark.slow
async def test_killed_at_any_step_the_next_one_has_the_same_or_a_fresh_one(pool: Pool) -> None:
    # All at once: most of it is waiting for interpreters.
    pools = {step: Pool(pool.path / step) for step in STEPS}
    runs = {step: each.run(step) for step, each in pools.items()}
    try:
        for step, run in runs.items():
            assert await asyncio.to_thread(run.wait) == -signal.SIGKILL, step
            assert run.stdout is not None
            run.stdout.close()
            had = {found.guardian.pid for found in find_detached(pools[step].path)}
            assert len(had) == (step not in ("before-write-2", "prepared")), step
            await next_manager(pools[step])
    finally:
        for each in pools.values():
            for pid in each.marked.pids():
                os.kill(pid, signal.SIGKILL)


async def test_a_damaged_state_is_none_with_a_warning(tmp_path: Path) -> None:
    home = PoolHome(tmp_path)
    home.write(PoolState(lane_token="x" * 40))
    home.state_path.write_text(home.state_path.read_text()[:40])
    warnings: list[str] = []
    assert home.read(warnings.append) == PoolState()
    assert "cannot be read" in warnings[0]


async def test_the_state_is_for_its_owner_only_and_whole(tmp_path: Path) -> None:
    home = PoolHome(tmp_path / "home")
    home.claim()
    state = home.read(pytest.fail)
    state.lane_token = "secret"
    home.write(state)
    assert home.state_path.stat().st_mode & 0o777 == 0o600
    assert home.path.stat().st_mode & 0o777 == 0o700
    assert home.read(pytest.fail).lane_token == "secret"
    assert [p.name for p in home.path.iterdir() if p.name.startswith("state")] == ["state.json"]
    home.release()
