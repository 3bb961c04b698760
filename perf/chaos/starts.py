"""``--starts``: starts an orchestrator while clients poll without a pause (OR-26). Each poll is
answered, refused or closed in time, and may delay a start by at most ``WITHIN_S``, even with tasks.
"""

import asyncio
import time
from dataclasses import dataclass

import aiohttp

from perf.chaos import checks
from perf.chaos.clients import ChaosLedger
from perf.chaos.faults import kill_process
from perf.chaos.polls import WITHIN_S, Polled, Polls
from perf.chaos.world import GRACE_S, World
from perf.stack.stack import READY_S
from pool.units.orchestrator import OrchestratorProcess

CLIENTS, EVERY_S, TASKS = 4, 0.002, 70
_TASK = {"prompt": "a", "max_tokens": 400, "ignore_eos": True, "durable": True}


@dataclass(frozen=True, slots=True)
class StartsRow:
    """Starts after one kind of end: seconds to the first answer, without and with clients."""

    ended_by: str
    tasks: int
    alone_s: list[float]
    polled_s: list[float]
    polls: Polled


async def run(world: World, ledger: ChaosLedger, starts: int, kills: int) -> list[StartsRow]:
    """Start the first orchestrator ``starts`` times with and without clients, then with tasks."""
    process, gate, rows = world.orchestrators[0], world.gates[0], list[StartsRow]()
    for tasks in (0, TASKS):
        async with aiohttp.ClientSession(process.url, raise_for_status=True) as http:
            for _ in range(tasks):
                await http.post("/v2/tasks", json=_TASK, headers={"X-Timeout-Ms": "3600000"})
        gate.shut()
        for ended_by, count in (("SIGTERM", starts), ("kill -9", kills)):
            polls = Polls(world, ledger)
            polls.every_s = EVERY_S
            rows.append(row := StartsRow(ended_by, tasks, [], [], polls.polled))
            for _ in range(count):
                row.alone_s.append(await _start(process, ended_by))
                polls.start(CLIENTS, only=1)
                row.polled_s.append(await _start(process, ended_by))
                await polls.stop()
            if row.polled_s and max(row.polled_s) > max(row.alone_s) + WITHIN_S:
                ledger.fault(f"a start took {max(row.polled_s)} s with clients")
        gate.open()
        await process.wait_ready(READY_S)
    await checks.close(world, ledger)
    return rows


async def _start(process: OrchestratorProcess, ended_by: str) -> float:
    await (process.stop(GRACE_S + 2.0) if ended_by == "SIGTERM" else kill_process(process))
    began = time.monotonic()
    await process.start()
    took_s = round(time.monotonic() - began, 2)
    await asyncio.sleep(0.2)
    return took_s
