"""A machine of simulated units, for a pool manager on virtual time."""

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

from catalog.errors import StartFailed
from perf.sim.replay.loop import VirtualLoop
from pool.events import EventKind, PoolEvent
from pool.fleet.home import InstanceRecord, PoolState
from pool.manager import POLICY, Manager
from pool.process.proc import ProcessId
from pool.process.process import FoundRun, Label
from pool.supervise import OnStep, RestartPolicy

LOAD_S = 2.0


@dataclass(frozen=True)
class FakeSpec:
    """``version`` stands for all that an instance is."""

    name: str
    version: int = 1
    has_own_ports: bool = True

    @property
    def digest(self) -> str:
        return f"{self.name} {self.version}"


@dataclass
class Server:
    """Something that runs on the fake machine, watched or not."""

    name: str
    digest: str
    mark: str
    port: int
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    drained_s: float | None = None

    @property
    def found(self) -> FoundRun:
        facts = {"digest": self.digest, "ports": f"0,{self.port},0"}
        return FoundRun(ProcessId(1, 1), Label(self.name, self.mark, "home", facts))


class FakeMachine:
    """What runs, and what goes wrong. Machine, home and registrar of a manager."""

    def __init__(self) -> None:
        self.servers: list[Server] = []
        self.failing: dict[str, int] = {}
        """By digest, how many of its starts fail."""
        self.has_room = True
        self.ready: frozenset[str] = frozenset()
        self.told_ready: list[frozenset[str]] = []
        self.written = PoolState()
        self.events: list[PoolEvent] = []
        self.starts: list[tuple[float, str]] = []
        self.ports = itertools.count(9001)

    def running(self) -> dict[str, Server]:
        """By name; two of one name are an error."""
        live = [server for server in self.servers if not server.ended.is_set()]
        assert len({server.name for server in live}) == len(live), f"twins: {live}"
        return {server.name: server for server in live}

    def kinds(self, name: str) -> list[EventKind]:
        return [event.kind for event in self.events if event.target == name]

    def manager(self, policy: RestartPolicy = POLICY) -> Manager:
        manager = Manager(
            self,
            self.events.append,
            drain_s=30.0,
            policy=policy,
            home=self,
            registrar=self,
            state=self.written,
        )
        manager._rng.seed(1)
        return manager

    # ── Machine ──────────────────────────────────────────────────────────────────────────────

    def found(self) -> Sequence[FoundRun]:
        return [server.found for server in self.servers if not server.ended.is_set()]

    def make(self, spec: FakeSpec, kept: InstanceRecord | None, on_step: OnStep) -> "FakeUnit":
        port = 0 if kept is None else kept.ports[1]
        return FakeUnit(self, spec.name, spec.digest, port, on_step)

    def make_former(self, found: FoundRun, on_step: OnStep) -> "FakeUnit":
        return FakeUnit(self, found.label.unit, "former", 0, on_step)

    async def fits_beside(self, spec: FakeSpec) -> bool:
        return self.has_room and spec.has_own_ports

    # ── Keeper ───────────────────────────────────────────────────────────────────────────────

    def write(self, state: PoolState) -> None:
        self.written = state

    # ── Registrar ────────────────────────────────────────────────────────────────────────────

    def set_ready(self, addresses: frozenset[str]) -> None:
        if addresses != self.ready:
            self.told_ready.append(addresses)
        self.ready = addresses

    async def wait_told(self, timeout_s: float) -> None:
        pass


class FakeUnit:
    """``ProcessUnit``."""

    where = "nowhere"
    misses = 0
    pid = None

    def __init__(
        self, machine: FakeMachine, name: str, digest: str, port: int, on_step: OnStep
    ) -> None:
        self.name = name
        self.port = port
        self.on_step = on_step
        self._machine = machine
        self._digest = digest
        self._server: Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}" if self.port else ""

    async def start(self) -> None:
        machine = self._machine
        machine.starts.append((asyncio.get_running_loop().time(), self.name))
        self.on_step("fits")
        self.port = self.port or next(machine.ports)
        self._server = Server(
            self.name, self._digest, f"mark-{self.port}-{len(machine.servers)}", self.port
        )
        machine.servers.append(self._server)
        self.on_step("started")
        await asyncio.sleep(LOAD_S)
        if machine.failing.get(self._digest):
            machine.failing[self._digest] -= 1
            raise StartFailed(f"{self._digest} does not load")

    async def attach(self, found: FoundRun) -> None:
        self._server = next(s for s in self._machine.servers if s.mark == found.label.mark)
        self.port = self._server.port
        if self._server.ended.is_set():
            raise StartFailed("it has ended")

    async def resume(self) -> None:
        await asyncio.sleep(0.01)

    async def lost(self) -> str:
        assert self._server is not None
        await self._server.ended.wait()
        return "it died"

    async def stop(self, drain_s: float) -> None:
        server, self._server = self._server, None
        if server is not None and not server.ended.is_set():
            server.drained_s = drain_s
            await asyncio.sleep(min(drain_s, 1.0))
            server.ended.set()

    def kill(self) -> None:
        if self._server is not None:
            self._server.ended.set()

    @property
    def mark(self) -> str:
        return "" if self._server is None else self._server.mark

    @property
    def all_ports(self) -> tuple[int, int, int]:
        return 0, self.port, 0


def simulate(work: Coroutine[Any, Any, None]) -> None:
    """Run on virtual time: hours pass at once."""
    loop = VirtualLoop()
    try:
        loop.run_until_complete(work)
    finally:
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()


def simulated(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run a test on virtual time."""
    return wraps(test)(lambda: simulate(test()))


async def killed(manager: Manager) -> None:
    """As after kill -9: it does nothing any more, and its instances know nothing of it."""
    for member in (*manager.members.values(), *manager.incoming.values()):
        await member.leave()
