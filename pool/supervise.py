"""Units and their supervision. A unit is a process under a guardian. It is restarted when lost, and
given up if it keeps failing (PV-1)."""

import asyncio
import random
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, TypedDict, Unpack

from catalog.errors import ProvisionError, StartFailed
from pool.events import EventKind, PoolEvent, pool_log
from pool.process.logs import ignore, tail, usable_log
from pool.process.process import FoundRun, GuardedProcess, Label, OnStep, new_mark

HEARTBEAT_S = 15.0
MISSES = 3
TERM_S = 1.5
"""Seconds from SIGTERM to SIGKILL: enough for ``finalize``, after which Triton polls every 1 s."""
_POLL_S = 0.03


class UnitOptions(TypedDict, total=False):
    """Options of every unit."""

    log: Path | None
    """Its log file; None: it logs to stderr."""
    warn: Callable[[str], None]
    home: Path | None
    """Folder of a pool whose processes outlive us; None: the process ends with us."""
    heartbeat_s: float | None
    """Seconds between heartbeats; None means ``HEARTBEAT_S``."""
    on_step: OnStep


class ProcessUnit(ABC):
    """A unit: one process under a guardian, with its own log file."""

    start_s = 30.0
    """Maximum seconds for a start."""

    def __init__(self, name: str, **options: Unpack[UnitOptions]) -> None:
        self.name = name
        self._log = self._log_path = options.get("log")
        """Log file of this start's output; None for stderr."""
        self._warn = options.get("warn", ignore)
        self._home = options.get("home")
        self._heartbeat_s = options.get("heartbeat_s")
        self._on_step = options.get("on_step", ignore)
        self._process: GuardedProcess | None = None
        self.misses = 0
        """Total number of heartbeats without an answer."""

    @property
    def pid(self) -> int | None:
        """Id of the process; None if there is none."""
        return self._process.pid if self._process else None

    @property
    def address(self) -> str:
        """The address for orchestrators; empty if they need none."""
        return ""

    @property
    def all_ports(self) -> tuple[int, int, int]:
        """Ports for HTTP, gRPC and metrics; 0 for a port that it does not have."""
        return 0, 0, 0

    @property
    def mark(self) -> str:
        """Name of the run of its process; empty if there is none."""
        return self._process.found.label.mark if self._process else ""

    @property
    @abstractmethod
    def where(self) -> str:
        """Its address, in words for a person."""

    @abstractmethod
    async def start(self) -> None:
        """Start it and wait until it serves. Raises ``StartFailed`` with a reason from its log."""

    async def attach(self, found: FoundRun) -> None:
        """Take over a running process. Raises ``StartFailed`` if it has ended."""
        self._process = await GuardedProcess.adopt(found, self._log)

    async def resume(self) -> None:
        """Wait until a started or taken-over process serves. Raises ``StartFailed``."""
        assert self._process is not None, "start it first"
        deadline = time.monotonic() + self.start_s
        while not await self._answers():
            if not self._process.running:
                raise self._failure(await self._status())
            if time.monotonic() > deadline:
                raise self._failure(f"was not ready after {self.start_s:.0f} s")
            await asyncio.sleep(_POLL_S)

    async def stop(self, drain_s: float) -> None:
        """End it. Running work has ``drain_s``. On return, all of its processes are gone."""
        if self._process is not None:
            await (self._process.end(TERM_S) if drain_s > 0 else self._process.kill())
            self._process = None

    async def lost(self) -> str:
        """Wait until it ends or hangs; return which, in a few words."""
        return await first_of(self._process_end(), self._heartbeats())

    def kill(self) -> None:
        """Send SIGKILL now; ``stop`` waits for the end."""
        if self._process is not None:
            self._process.order_kill()

    def facts(self) -> dict[str, str]:
        """Facts about its process for later keepers."""
        return {}

    @abstractmethod
    async def _answers(self) -> bool:
        """Whether it answers a heartbeat."""

    async def _heartbeats(self) -> str:
        """Wait for too many missed heartbeats in a row; return the reason."""
        missed = 0
        while missed < MISSES:
            await asyncio.sleep(self._heartbeat_s or HEARTBEAT_S)
            if await self._answers():
                missed = 0
            else:
                missed += 1
                self.misses += 1
        return f"it missed {MISSES} heartbeats"

    async def _spawn(self, command: Sequence[str], env: Mapping[str, str], mark: str = "") -> None:
        """Start the process with a fresh log. Raises ``StartFailed``."""
        self._log = usable_log(self._log_path, self._warn)
        label = Label(self.name, mark or new_mark(), str(self._home or ""), self.facts())
        self._process = await GuardedProcess.start(label, command, env, self._log, self._on_step)
        self._on_step("started")

    async def _process_end(self) -> str:
        return f"it {await self._status()}"

    async def _status(self) -> str:
        """Wait for the end of the process; return, for example, ``ended with status 1``."""
        assert self._process is not None, "start it first"
        return f"ended with status {await self._process.wait()}"

    def _failure(self, what: str) -> StartFailed:
        """The error for a failed start, with the reason from the log."""
        if self._log is None:
            return StartFailed(f"{self.name} {what}; its log above says why")
        reason = self._reason_in(self._log)
        return StartFailed(f"{self.name} {what}:\n{reason}\nThe whole log: {self._log}")

    def _reason_in(self, log: Path) -> str:
        return tail(log)


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Exponential backoff with jitter between a quarter and all of a pause, and when to give up."""

    first_delay_s: float = 0.2
    max_delay_s: float = 10.0
    max_failures: float = 5
    """Consecutive losses and failed starts before the unit is given up; ``math.inf``: never."""
    stable_s: float = 30.0
    """Seconds of service after which the failure count is reset."""
    first_too: bool = False
    """Whether the first start is also retried if it fails."""

    def delay_s(self, failures: int, rng: random.Random) -> float:
        """Pause in seconds before a restart after ``failures`` consecutive failures (from 1)."""
        doublings = min(failures - 1, 60)  # more would overflow
        return rng.uniform(0.25, 1.0) * min(self.max_delay_s, self.first_delay_s * 2.0**doublings)


class UnitState(StrEnum):
    """State of a unit. ``DOWN``: it failed or was lost, and restarts after a pause."""

    STARTING = "starting"
    READY = "ready"
    DOWN = "down"
    DRAINING = "draining"


@dataclass(eq=False)
class Supervised:
    """Supervises a unit from its first start to its end, and restarts it when it is lost."""

    unit: ProcessUnit
    digest: str
    """Identifies the unit's configuration."""
    emit: Callable[[PoolEvent], None]
    """Gets events; it must return at once and never raise."""
    changed: Callable[[], None]
    """Called after each change of state, under the same conditions."""
    rng: random.Random
    policy: RestartPolicy
    state: UnitState = field(default=UnitState.STARTING, init=False)
    reason: str = field(default="", init=False)
    """Why it is down; empty in other states."""
    restarts: int = field(default=0, init=False)
    _failures: int = field(default=0, init=False)
    _life: "asyncio.Task[None] | None" = field(default=None, init=False)
    _first: "asyncio.Future[str]" = field(default_factory=asyncio.Future, init=False)
    _given_up: "asyncio.Future[str]" = field(default_factory=asyncio.Future, init=False)

    @property
    def name(self) -> str:
        return self.unit.name

    @property
    def is_ready(self) -> bool:
        return self.state is UnitState.READY

    def begin(self, *, adopted: bool = False) -> None:
        """Start the unit, or resume one that was taken over, and keep it up."""
        begin = self.unit.resume if adopted else self.unit.start
        served = EventKind.ADOPTED if adopted else EventKind.READY
        self._life = asyncio.create_task(self._live(begin, served), name=f"keep {self.name}")

    async def first_outcome(self) -> str:
        """Wait for the first start. Returns "" once it serves, otherwise the reason."""
        return await asyncio.shield(self._first)

    async def given_up(self) -> str:
        """Wait until the unit is given up; return the reason."""
        return await asyncio.shield(self._given_up)

    async def retire(self) -> None:
        """Mark the unit as not ready and stop its supervision; call ``end`` next."""
        await self.leave()
        self._become(UnitState.DRAINING)

    async def end(self, drain_s: float) -> None:
        """End the unit; its work has ``drain_s``. All of its processes end. Idempotent."""
        await self.retire()
        await self.unit.stop(drain_s)

    async def leave(self) -> None:
        """Stop supervising the unit; it keeps running."""
        life, self._life = self._life, None
        if life is not None:
            await cancelled(life)

    async def _live(self, begin: Callable[[], Awaitable[None]], served: EventKind) -> None:
        reason = await self._started(begin, served)
        if reason and not self.policy.first_too:
            return
        while True:
            try:
                reason = reason or await self._lost()
                await self.unit.stop(0.0)
                self._failures += 1
                if self._failures > self.policy.max_failures:
                    times = f"{self._failures} times in a row"
                    reason = f"{self.name} failed {times}; the last time: {reason}"
                    self._given_up.set_result(reason)
                    return
                await self._pause(reason)
                self.restarts += 1
                self._become(UnitState.STARTING)
                reason = await self._started(self.unit.start, EventKind.READY)
            except Exception as error:
                # A bug here must not leave a unit unsupervised.
                pool_log.exception("the supervision of a unit failed; restarting the unit")
                reason = f"{type(error).__name__}: {error}"
                self._become(UnitState.DOWN, reason)
                await asyncio.sleep(self.policy.max_delay_s)

    async def _started(self, begin: Callable[[], Awaitable[None]], served: EventKind) -> str:
        """Start or resume the unit. Returns why it does not serve, or an empty string."""
        began, reason = _now(), ""
        try:
            await begin()
        except (ProvisionError, OSError) as error:
            reason = str(error) or "it did not start"
        except Exception as error:
            pool_log.exception("cannot start a unit; retrying")
            reason = f"{type(error).__name__}: {error}"
        else:
            self.emit(PoolEvent(served, self.name, self.unit.where, _now() - began))
        self._become(UnitState.DOWN if reason else UnitState.READY, reason)
        if not self._first.done():
            self._first.set_result(reason)
        return reason

    async def _lost(self) -> str:
        serving_since = _now()
        reason = await self.unit.lost()
        if _now() - serving_since >= self.policy.stable_s:
            self._failures = 0
        self._become(UnitState.DOWN, reason)
        return reason

    async def _pause(self, reason: str) -> None:
        pause_s = self.policy.delay_s(self._failures, self.rng)
        kind = EventKind.FAILED if self._first.result() else EventKind.LOST
        self.emit(PoolEvent(kind, self.name, reason, pause_s))
        await asyncio.sleep(pause_s)

    def _become(self, state: UnitState, reason: str = "") -> None:
        self.state, self.reason = state, reason
        self.changed()


def _now() -> float:
    return asyncio.get_running_loop().time()


async def first_of(*watches: Coroutine[Any, Any, str]) -> str:
    """Wait for the first of several watches; return its reason."""
    tasks = [asyncio.create_task(watch) for watch in watches]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        return done.pop().result()
    finally:
        for task in tasks:
            task.cancel()


async def cancelled(*tasks: "asyncio.Task[Any]") -> None:
    """Cancel tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
