"""Keeps one unit alive: restarts it if it is lost, gives up if that is pointless (PV-1)."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from catalog.errors import GaveUp, StartFailed
from pool.process.process import GuardedProcess, StartProcess

HEARTBEAT_S = 15.0
MISSES = 3


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Keeping:
    """How a unit's process is started, and how often it is asked whether it lives."""

    start_process: StartProcess = GuardedProcess.start
    heartbeat_s: float | None = None
    """Seconds between heartbeats; None means ``HEARTBEAT_S``."""
    on_miss: Callable[[], None] = _nothing
    """Called for each heartbeat without an answer."""


class Unit(Protocol):
    """Something that runs in processes of its own."""

    @property
    def name(self) -> str: ...

    @property
    def where(self) -> str:
        """The place where it can be reached, in words for a person."""

    async def start(self) -> None:
        """Start it and wait until it serves. Raises ``StartFailed``; ``stop`` is called even
        then."""

    async def lost(self) -> str:
        """Wait until it no longer serves; returns why, in a few words."""

    async def stop(self, drain_s: float) -> None:
        """End it: running work may go on for ``drain_s``, and nothing is left on return.

        Takes at most ``drain_s`` and 3.5 s. Idempotent, also when it never started.
        """

    def kill(self) -> None:
        """End it at once; ``stop`` still has to be awaited."""


_MAX_DOUBLINGS = 60
"""Most doublings of a pause: more would overflow one day."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Exponential backoff with full jitter above a quarter, and when to give up."""

    first_delay_s: float = 0.2
    max_delay_s: float = 10.0
    max_failures: float = 5
    """Losses and failed starts in a row after which the unit is given up; ``math.inf``: never."""
    stable_s: float = 30.0
    """Seconds of service after which a unit counts as having had no failures."""

    def delay_s(self, failures: int, rng: random.Random) -> float:
        """Pause before the start that follows ``failures`` failures in a row (from 1)."""
        doublings = min(failures - 1, _MAX_DOUBLINGS)
        ceiling = min(self.max_delay_s, self.first_delay_s * 2.0**doublings)
        return rng.uniform(0.25, 1.0) * ceiling


async def supervise(
    unit: Unit,
    policy: RestartPolicy,
    *,
    rng: random.Random,
    on_lost: Callable[[str, float], None],
    on_ready: Callable[[float], None],
    clock: Callable[[], float] = time.monotonic,
    failed: str | None = None,
) -> None:
    """Watch a started ``unit`` until cancelled; with ``failed``, one whose start failed for that
    reason.

    ``on_lost`` gets the reason and the pause in seconds before the next start, ``on_ready`` the
    seconds since the loss. Raises ``GaveUp``.
    """
    failures = 0
    while True:
        serving_since = clock()
        reason = await unit.lost() if failed is None else failed
        failed = None
        lost_at = clock()
        if lost_at - serving_since >= policy.stable_s:
            failures = 0
        while True:
            await unit.stop(0.0)
            failures += 1
            if failures > policy.max_failures:
                raise GaveUp(f"{unit.name} failed {failures} times in a row; at last: {reason}")
            pause_s = policy.delay_s(failures, rng)
            on_lost(reason, pause_s)
            await asyncio.sleep(pause_s)
            try:
                await unit.start()
                break
            except StartFailed as error:
                reason = str(error)
        on_ready(clock() - lost_at)


async def first_of(*watches: Coroutine[Any, Any, str]) -> str:
    """The reason of the first of several watches that returns."""
    tasks = [asyncio.create_task(watch) for watch in watches]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()


async def missed_heartbeats(
    answers: Callable[[], Awaitable[bool]], keeping: Keeping | None = None
) -> str:
    """Wait until ``answers`` has been False ``MISSES`` times in a row; returns the reason."""
    keeping = keeping or Keeping()
    misses = 0
    while misses < MISSES:
        await asyncio.sleep(HEARTBEAT_S if keeping.heartbeat_s is None else keeping.heartbeat_s)
        if await answers():
            misses = 0
        else:
            misses += 1
            keeping.on_miss()
    return f"it missed {MISSES} heartbeats"
