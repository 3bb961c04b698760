"""Clients that poll each orchestrator's health all the time, also during its start (OR-26, OR-27).

Each poll has its own connection. It must be answered, refused or closed in time, whatever happens
to the process; only a stopped process may leave it open. If the orchestrators share a state, some
polls query a durable task. No task may be gone, and no poll may wait longer than it takes to detect
that the task's orchestrator is stopped.
"""

import asyncio
import random
import time
from dataclasses import dataclass

import aiohttp

from perf.chaos.clients import ChaosLedger
from perf.chaos.world import World, stood_still

EVERY_S = 0.05
"""Seconds between polls of one client: several fall into each phase of a start."""
WITHIN_S = 1.0
"""Seconds within which each poll is answered, refused or closed."""
_TICK_S = 0.02
_LATEST = 100
"""Number of latest durable tasks to query."""


@dataclass(slots=True)
class Polled:
    """Results of the polls, for the bundle."""

    answered: int = 0
    refused: int = 0
    """Number of polls whose connection was refused or closed."""
    slowest_ms: float = 0.0
    tasks: int = 0
    """Number of answers about durable tasks."""
    slowest_task_ms: float = 0.0


class Polls:
    """Polls of all orchestrators, until they are stopped."""

    every_s = EVERY_S

    def __init__(self, world: World, ledger: ChaosLedger, *, task_within_s: float = 0.0) -> None:
        """``task_within_s``: maximum wait for the state of any durable task; 0: no such polls."""
        self.polled = Polled()
        self._world = world
        self._ledger = ledger
        self._task_within_s = task_within_s
        self._lag_s = 0.0
        """Total delay of this process, which must not count against an orchestrator."""
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, each: int, only: int | None = None) -> None:
        """Start ``each`` clients for each orchestrator, or only for the first ``only``."""
        loops = [self._tick()]
        for at in range(len(self._world.orchestrators[:only])):
            loops += [self._poll(at) for _ in range(each)]
            if self._task_within_s:
                loops.append(self._ask(at, random.Random(at)))
        self._tasks = [asyncio.create_task(each) for each in loops]

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        ended = await asyncio.gather(*self._tasks, return_exceptions=True)
        for one in ended:
            if isinstance(one, Exception):
                raise one

    async def _tick(self) -> None:
        while True:
            at = time.monotonic()
            await asyncio.sleep(_TICK_S)
            self._lag_s += time.monotonic() - at - _TICK_S

    async def _poll(self, at: int) -> None:
        while True:
            await asyncio.sleep(self.every_s)
            status, took_s = await self._get(at, "/health/ready", WITHIN_S)
            self.polled.answered += status > 0
            self.polled.refused += status == 0
            self.polled.slowest_ms = max(self.polled.slowest_ms, round(1000 * took_s, 1))

    async def _ask(self, at: int, rng: random.Random) -> None:
        while True:
            await asyncio.sleep(4 * self.every_s)
            if not self._ledger.durable_ids:
                continue
            task_id = rng.choice(self._ledger.durable_ids[-_LATEST:])
            status, took_s = await self._get(at, f"/v2/tasks/{task_id}", self._task_within_s)
            if status in (404, 410):
                self._ledger.fault(f"durable task {task_id} was said to be gone")
            self.polled.tasks += status > 0
            self.polled.slowest_task_ms = max(self.polled.slowest_task_ms, round(1000 * took_s, 1))

    async def _get(self, at: int, path: str, within_s: float) -> tuple[int, float]:
        """The status of one poll, and its seconds. The status is 0 without an answer, and the time
        is 0 s if the process was stopped during the poll."""
        process = self._world.orchestrators[at]
        pid, began, lag_s = process.pid, time.monotonic(), self._lag_s
        status = 0
        timeout = aiohttp.ClientTimeout(total=4 * within_s)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout) as http,
                http.get(f"{process.url}{path}", headers={"Connection": "close"}) as response,
            ):
                await response.read()
                status = response.status
        except (aiohttp.ClientError, TimeoutError):
            pass
        took_s = time.monotonic() - began - (self._lag_s - lag_s)
        if stood_still(self._world, {pid, process.pid}, began):
            return status, 0.0
        if took_s > within_s:
            self._ledger.fault(f"{path.rpartition('/')[0]} took {took_s:.1f} s at {process.name}")
        return status, took_s
