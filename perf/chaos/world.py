"""Two orchestrators, each with a journal, in front of Tritons, and what can happen to them."""

import asyncio
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from orchestrator.pool.paths import state_dir
from orchestrator.pool.process.ports import free_ports
from orchestrator.pool.units.orchestrator import OrchestratorProcess
from orchestrator.pool.units.triton import TritonInstance
from perf.load.connection import HOST
from perf.stack.stack import StackSpec, tritons

READY_S = 60.0
GRACE_S = 5.0
"""Of a planned stop: less than some of the load takes, so that not everything may just end."""
LONG_S = 4.0
"""A process stands still for so long that its peers give it up (``TIDEGATE_DOWN_AFTER_S``)."""
SHORT_S = 0.7
"""And so short that they do not."""


@dataclass(frozen=True, slots=True)
class World:
    """What is running. Units keep their ports when they are started again."""

    tritons: Sequence[TritonInstance]
    orchestrators: Sequence[OrchestratorProcess]
    journals: Sequence[Path]

    def pids(self) -> set[int]:
        """Of everything that runs now."""
        found = {one.pid for one in self.orchestrators}
        for triton in self.tritons:
            found |= {_server_of(triton), *_stubs_of(triton)}
        return {pid for pid in found if pid is not None}

    def parts(self) -> dict[str, list[int]]:
        """Process ids of everything that runs now, by what it is."""
        return {
            "orchestrator": [_alive(one.pid) for one in self.orchestrators],
            "Triton": [_server_of(one) for one in self.tritons],
            "worker": [pid for one in self.tritons for pid in _stubs_of(one)],
        }

    def memory_prefixes(self) -> set[str]:
        """How the names of shared memory of the servers that run now begin: others have theirs on
        the same machine."""
        found = set()
        for triton in self.tritons:
            arguments = (
                Path(f"/proc/{_server_of(triton)}/cmdline").read_bytes().decode().split("\0")
            )
            found |= {one.removeprefix("--id=") for one in arguments if one.startswith("--id=")}
        return found


@dataclass(frozen=True, slots=True)
class Fault:
    """``spares`` says who must not notice: ``all``, or all but those whose orchestrator it hits
    (``durable`` requests must not notice anything)."""

    name: str
    spares_all: bool
    happen: Callable[[World], Awaitable[None]]


@asynccontextmanager
async def orchestrating(
    addresses: Sequence[str], count: int = 2, env: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[list[OrchestratorProcess], list[Path]]]:
    """So many orchestrators in front of ``addresses``, ready, each with a journal of its own;
    ``env`` are more ``TIDEGATE_…``."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tidegate-chaos-")))
        journals = [folder / f"journal-{number}.sqlite" for number in range(count)]
        started = []
        for number, journal in enumerate(journals):
            process = OrchestratorProcess(
                HOST,
                free_ports(1)[0],
                {
                    "TIDEGATE_INSTANCES": ",".join(addresses),
                    "TIDEGATE_TOKEN": "",
                    "TIDEGATE_JOURNAL_PATH": str(journal),
                    "TIDEGATE_SHUTDOWN_GRACE_S": str(GRACE_S),
                    "TIDEGATE_LOG_FORMAT": "text",
                    **(env or {}),
                },
                log=state_dir() / "perf" / f"chaos-orchestrator-{number}.log",
            )
            stack.push_async_callback(process.stop, 0.0)
            await process.start()
            started.append(process)
        for process in started:
            await process.wait_ready(READY_S)
        yield started, journals


@asynccontextmanager
async def running(spec: StackSpec) -> AsyncIterator[World]:
    """Two of each. Raises ``ProvisionError`` when one cannot be started."""
    async with (
        tritons(spec, 2) as instances,
        orchestrating([one.grpc_address for one in instances]) as (orchestrators, journals),
    ):
        yield World(instances, orchestrators, journals)


# ── what happens ─────────────────────────────────────────────────────────────────────────────────


def orchestrator_faults(number: int) -> list[Fault]:
    """To one orchestrator."""

    async def kill(world: World) -> None:
        process = world.orchestrators[number]
        os.kill(_alive(process.pid), signal.SIGKILL)
        await process.stop(0.0)
        await process.start()
        await process.wait_ready(READY_S)

    async def restart(world: World) -> None:
        await _restart_orchestrator(world.orchestrators[number])

    async def pause(world: World) -> None:
        await _stand_still(_alive(world.orchestrators[number].pid), LONG_S)

    return [
        Fault(f"kill -9 orchestrator {number}", False, kill),
        Fault(f"SIGSTOP orchestrator {number}, {LONG_S:g} s", True, pause),
        Fault(f"SIGTERM and restart orchestrator {number}", True, restart),
    ]


def triton_faults(number: int) -> list[Fault]:
    """To one Triton."""

    async def kill_server(world: World) -> None:
        await _replace(world.tritons[number], _server_of(world.tritons[number]))

    async def kill_stub(world: World) -> None:
        await _replace(world.tritons[number], _stubs_of(world.tritons[number])[0])

    async def pause(world: World) -> None:
        await _stand_still(_server_of(world.tritons[number]), LONG_S)

    async def blink(world: World) -> None:
        await _stand_still(_stubs_of(world.tritons[number])[0], SHORT_S)

    return [
        Fault(f"kill -9 Triton {number}", True, kill_server),
        Fault(f"kill -9 worker {number}", True, kill_stub),
        Fault(f"SIGSTOP Triton {number}, {LONG_S:g} s", True, pause),
        Fault(f"SIGSTOP worker {number}, {SHORT_S:g} s", True, blink),
    ]


async def _restart_all(world: World) -> None:
    for process in world.orchestrators:
        await _restart_orchestrator(process)
    for triton in world.tritons:
        await triton.stop(GRACE_S)
        await triton.start()
        for process in world.orchestrators:
            await process.wait_ready(READY_S)
        await asyncio.sleep(1.0)  # until lanes to it are open again


ROLLING_RESTART = Fault("rolling restart of everything", True, _restart_all)


async def _restart_orchestrator(process: OrchestratorProcess) -> None:
    await process.stop(GRACE_S + 2.0)
    await process.start()
    await process.wait_ready(READY_S)


async def _replace(triton: TritonInstance, victim: int) -> None:
    os.kill(victim, signal.SIGKILL)
    await asyncio.sleep(0.2)
    await triton.stop(0.0)
    await triton.start()


async def _stand_still(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)


def _alive(pid: int | None) -> int:
    assert pid is not None, "it is not running"
    return pid


def _server_of(triton: TritonInstance) -> int:
    return _alive(cast("int | None", triton.describe()["pid"]))


def _stubs_of(triton: TritonInstance) -> list[int]:
    return cast("list[int]", triton.describe()["stub_pids"])
