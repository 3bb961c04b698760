"""A pool manager in a process of its own that kills itself at a step of a start.

    python -m tests.support.killed_manager HOME STEP

Its one instance, ``one``, is a process that sleeps. ``STEP`` is when: before or after the state is
written for the ``n``-th time (``before-write-1``), or a step of a start (``prepared``, ``spawned``,
``started``).
"""

import asyncio
import os
import random
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from pool.fleet.home import InstanceRecord, PoolHome, PoolState
from pool.manager import Manager
from pool.process.process import FoundRun, OnStep, clear_remains, find_detached
from pool.supervise import ProcessUnit
from tests.support.fake_pool import FakeSpec

SLEEP = ("bash", "-c", "sleep 1000 & wait")


class DyingHome(PoolHome):
    """Kills its process before or after a write."""

    def __init__(self, path: Path, step: str) -> None:
        super().__init__(path)
        self._step = step
        self._writes = 0

    def write(self, state: PoolState) -> None:
        self._writes += 1
        die_at(self._step, f"before-write-{self._writes}")
        super().write(state)
        die_at(self._step, f"after-write-{self._writes}")


class Sleeper(ProcessUnit):
    """A process that does nothing, at a port that nobody listens on."""

    where = "nowhere"

    def __init__(self, home: Path, name: str, digest: str, port: int, on_step: OnStep) -> None:
        self.port = port or random.randrange(10_000, 60_000)
        self._digest = digest
        super().__init__(name, home=home, on_step=on_step)

    def facts(self) -> dict[str, str]:
        return {"digest": self._digest, "ports": f"0,{self.port},0"}

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def all_ports(self) -> tuple[int, int, int]:
        return 0, self.port, 0

    async def start(self) -> None:
        await self._spawn(SLEEP, os.environ)

    async def attach(self, found: FoundRun) -> None:
        self.port = found.ports[1]
        await super().attach(found)

    async def _answers(self) -> bool:
        return True


class SleeperMachine:
    """``Machine``, with real processes."""

    def __init__(self, home: Path, step: str = "none") -> None:
        self.home = home
        self._step = step

    def found(self) -> Sequence[FoundRun]:
        found = find_detached(self.home)
        clear_remains(self.home, found)
        return found

    def make(self, spec: FakeSpec, kept: InstanceRecord | None, on_step: OnStep) -> Sleeper:
        def stepped(step: str) -> None:
            die_at(self._step, step)
            on_step(step)

        port = 0 if kept is None else kept.ports[1]
        return Sleeper(self.home, spec.name, spec.digest, port, stepped)

    def make_former(self, found: FoundRun, on_step: OnStep) -> Sleeper:
        return Sleeper(self.home, found.label.unit, "", 0, on_step)

    async def fits_beside(self, spec: FakeSpec) -> bool:
        return True


def die_at(wanted: str, step: str) -> None:
    if step == wanted:
        os.kill(os.getpid(), signal.SIGKILL)


async def manage(home: PoolHome, machine: SleeperMachine) -> Manager:
    """A manager whose one instance is ready. ``home`` is to be claimed."""
    state = home.read(lambda warning: None)
    manager = Manager(machine, lambda event: None, drain_s=30.0, home=home, state=state)
    specs = {"one": FakeSpec("one")}
    await manager.recover(specs)
    await manager.apply(specs)
    assert await manager.members["one"].first_outcome() == ""
    return manager


async def main() -> None:
    step = sys.argv[2]
    home = DyingHome(Path(sys.argv[1]), step)
    home.claim()
    await manage(home, SleeperMachine(home.path, step))


if __name__ == "__main__":
    asyncio.run(main())
