"""Faults of the processes of a ``World``."""

import asyncio
import math
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass

import aiohttp

from catalog.errors import StartFailed
from perf.chaos.world import GRACE_S, World
from perf.stack.stack import READY_S, alive, server_of, stubs_of
from pool.process.proc import is_running
from pool.units.orchestrator import OrchestratorProcess
from pool.units.triton import TritonInstance
from worker.runner.simulated_device import DeviceFault

LONG_S = 4.0
"""Seconds of a stop that is long enough for peers to give a process up
(``orchestrator.lanes.config.DOWN_AFTER_S``)."""
STALLED_S = 6.5
"""Seconds of a stop that is long enough for a process's own health port to give it up
(``orchestrator.api.health_port.responder.STALLED_AFTER_S``)."""
RECOVERS_S = 1.0
"""Seconds for a process, after a stop, to handle the requests that arrived during it."""
SHORT_S = 0.7
"""Seconds of a stop that is too short for peers to give a process up."""
LEAVES_S = 20.0
"""Seconds within which a worker with a failed device must be out of service: the two that it has
itself, plus a margin for a busy machine."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault; ``costs`` are the outcomes other than ``met`` that it allows for requests that are
    not durable."""

    name: str
    costs: frozenset[str]
    happen: Callable[[World], Awaitable[float | None]]
    """Causes the fault. For a device fault, returns the seconds until no orchestrator sent the
    worker anything."""
    kills: int = 0
    """Number of orchestrators that it ends with SIGKILL."""
    stops: int = 0
    """Number of times that it stops an orchestrator with SIGSTOP."""
    ends_worker: bool = False
    """Whether it kills a worker, or may. A task that was on two dead workers is not sent to a
    third, so no task may live through two such faults."""


_DEVICE_FAULTS = {
    DeviceFault.LOST: "dies",
    DeviceFault.HANGS: "hangs",
    DeviceFault.FULL: "has no memory left",
    DeviceFault.XID: "is lost, as its driver reports",
}
_NOBODY_NOTICES = frozenset[str]()
DIES = frozenset({"broken", "gone"})
"""Outcomes when an orchestrator dies: its responses break off, and its tasks are lost."""


def kills(number: int, seed: int = 1) -> list[Fault]:
    """Kills of one orchestrator. One kills it again while it takes over the tasks of the killed
    one. One keeps its lanes shut, so that clients return before their tasks have a model."""
    rng = random.Random(f"kill {number} {seed}")

    async def kill(world: World) -> None:
        await kill_process(world.orchestrators[number])
        await start_process(world.orchestrators[number])

    async def kill_again(world: World) -> None:
        process = world.orchestrators[number]
        await kill_process(process)
        starting = asyncio.create_task(process.start())
        await asyncio.sleep(rng.uniform(0.4, 2.0))
        if process.pid is not None:
            os.kill(process.pid, signal.SIGKILL)
        with suppress(StartFailed):
            await starting
        await process.stop(0.0)
        await start_process(process)

    async def kill_shut(world: World) -> None:
        """Restart it with its lanes shut until clients have returned."""
        process, gate = world.orchestrators[number], world.gates[number]
        await kill_process(process)
        gate.shut()
        try:
            await process.start()
            await asyncio.sleep(rng.uniform(0.5, 1.0))
        finally:
            gate.open()
        await process.wait_ready(READY_S)

    name = f"kill -9 orchestrator {number}"
    return [
        Fault(name, DIES, kill, 1),
        Fault(f"{name}, and as it starts", DIES, kill_again, 2),
        Fault(f"{name}, its lanes shut", DIES, kill_shut, 1),
    ]


def stops(number: int, seed: int = 1) -> list[Fault]:
    """Stops of one orchestrator, for several durations. One stops it during a start, after a
    kill."""
    rng, name = random.Random(f"stop {number} {seed}"), f"SIGSTOP orchestrator {number}"

    def pause(seconds: float, times: int = 1) -> Callable[[World], Awaitable[None]]:
        async def happen(world: World) -> None:
            for _ in range(times):
                await stand_still(world, alive(world.orchestrators[number].pid), seconds)
                await asyncio.sleep(rng.uniform(0.1, 0.5))

        return happen

    async def pause_start(world: World) -> None:
        process = world.orchestrators[number]
        await kill_process(process)
        starting = asyncio.create_task(process.start())
        while process.pid is None and not starting.done():  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
        await asyncio.sleep(rng.uniform(0.1, 2.0))
        await stand_still(world, alive(process.pid), LONG_S)
        await starting
        await process.wait_ready(READY_S)

    return [
        Fault(f"{name}, {SHORT_S:g} s twice", _NOBODY_NOTICES, pause(SHORT_S, 2), stops=2),
        Fault(f"{name}, {LONG_S:g} s", _NOBODY_NOTICES, pause(LONG_S), stops=1),
        Fault(f"{name}, {STALLED_S:g} s", _NOBODY_NOTICES, pause(STALLED_S), stops=1),
        Fault(f"{name}, killed, as it starts", DIES, pause_start, kills=1, stops=1),
    ]


def orchestrator_faults(number: int) -> list[Fault]:
    """Faults of one orchestrator: as many stops as kills."""

    async def restart(world: World) -> None:
        await _restart_orchestrator(world.orchestrators[number])

    return [
        *kills(number, seed=1),
        *stops(number, seed=1),
        Fault(f"SIGTERM and restart orchestrator {number}", _NOBODY_NOTICES, restart),
    ]


def triton_kills(number: int) -> list[Fault]:
    """Kills of one Triton and of its worker."""

    async def kill_server(world: World) -> None:
        await _replace(world.tritons[number], server_of(world.tritons[number]))

    async def kill_stub(world: World) -> None:
        await _replace(world.tritons[number], stubs_of(world.tritons[number])[0])

    return [
        Fault(f"kill -9 Triton {number}", _NOBODY_NOTICES, kill_server, ends_worker=True),
        Fault(f"kill -9 worker {number}", _NOBODY_NOTICES, kill_stub, ends_worker=True),
    ]


def triton_faults(number: int) -> list[Fault]:
    """Faults of one Triton."""

    async def pause(world: World) -> None:
        await stand_still(world, server_of(world.tritons[number]), LONG_S)

    async def blink(world: World) -> None:
        await stand_still(world, stubs_of(world.tritons[number])[0], SHORT_S)

    still, short = (
        f"SIGSTOP Triton {number}, {LONG_S:g} s",
        f"SIGSTOP worker {number}, {SHORT_S:g} s",
    )
    return [
        *triton_kills(number),
        Fault(still, _NOBODY_NOTICES, pause, ends_worker=True),
        Fault(short, _NOBODY_NOTICES, blink, ends_worker=True),
    ]


def device_faults(number: int) -> list[Fault]:
    """Faults of one worker's device, which only the paced synthetic engine can fake."""

    def of(fault: DeviceFault) -> Fault:
        async def befall(world: World) -> float:
            triton = world.tritons[number]
            (stub,) = stubs_of(triton)
            await asyncio.to_thread(world.fault_file.write_text, f"{fault} {stub}")
            at = time.monotonic()
            await _out_of_service(world, number)
            left_s = time.monotonic() - at
            async with asyncio.timeout(READY_S):
                while is_running(stub):  # noqa: ASYNC110 - it is not a child of this process
                    await asyncio.sleep(0.05)
            await triton.stop(0.0)
            await triton.start()
            return left_s

        name = f"the device under worker {number} {_DEVICE_FAULTS[fault]}"
        return Fault(name, _NOBODY_NOTICES, befall, ends_worker=True)

    return [of(fault) for fault in DeviceFault]


async def until_whole(world: World) -> None:
    """Wait until every orchestrator reaches every Triton, so that the next fault is a single one.
    Raises ``TimeoutError``."""
    async with asyncio.timeout(READY_S), aiohttp.ClientSession() as http:
        for process in world.orchestrators:
            while True:
                async with http.get(f"{process.url}/v2/instances") as response:
                    instances = (await response.json())["instances"]
                if all(instance["ready"] for instance in instances):
                    break
                await asyncio.sleep(0.1)


async def _out_of_service(world: World, number: int) -> None:
    """Wait until no orchestrator sends work to one Triton. Raises ``TimeoutError``."""
    async with asyncio.timeout(LEAVES_S), aiohttp.ClientSession() as http:
        for process, gate in zip(world.orchestrators, world.gates, strict=True):
            while True:
                async with http.get(f"{process.url}/v2/instances") as response:
                    instances = (await response.json())["instances"]
                (dying,) = [i for i in instances if i["address"] == gate.addresses[number]]
                if not dying["ready"]:
                    break
                await asyncio.sleep(0.02)


async def _restart_all(world: World) -> None:
    for process in world.orchestrators:
        await _restart_orchestrator(process)
    for triton in world.tritons:
        await triton.stop(GRACE_S)
        await triton.start()
        await until_whole(world)


ROLLING_RESTART = Fault("rolling restart of everything", _NOBODY_NOTICES, _restart_all)


async def _restart_orchestrator(process: OrchestratorProcess) -> None:
    await process.stop(GRACE_S + 2.0)
    await start_process(process)


async def kill_process(process: OrchestratorProcess) -> None:
    os.kill(alive(process.pid), signal.SIGKILL)
    await process.stop(0.0)


async def start_process(process: OrchestratorProcess) -> None:
    await process.start()
    await process.wait_ready(READY_S)


async def _replace(triton: TritonInstance, victim: int) -> None:
    os.kill(victim, signal.SIGKILL)
    await asyncio.sleep(0.2)
    await triton.stop(0.0)
    await triton.start()


async def stand_still(world: World, pid: int, seconds: float) -> None:
    world.still[pid] = math.inf
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)
        world.still[pid] = time.monotonic() + RECOVERS_S
