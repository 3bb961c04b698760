"""One instance of a pool: from its first start, or its adoption, to its end.

An instance is never given up: one that keeps failing is started again once a minute, and the others
go on.
"""

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from catalog.errors import ProvisionError, StartFailed
from pool.fleet.home import InstanceRecord
from pool.process.detached import Found
from pool.supervise import RestartPolicy, Unit, supervise

pool_log = logging.getLogger("orchestrator.pool")
POLICY = RestartPolicy(first_delay_s=0.5, max_delay_s=60.0, max_failures=math.inf, stable_s=60.0)


class MemberState(StrEnum):
    """State of an instance. ``DOWN``: it failed or was lost, and is started again after a pause."""

    STARTING = "starting"
    READY = "ready"
    DOWN = "down"
    DRAINING = "draining"


class InstanceEvent(StrEnum):
    """Kinds of events of an instance, or (the last five) of the pool."""

    FITS = "fits"
    SPAWNED = "spawned"
    ADOPTED = "adopted"
    READY = "ready"
    LOST = "lost"
    FAILED = "failed"
    REPLACING = "replacing"
    KEPT = "kept"
    STOPPING = "stopping"
    STOPPED = "stopped"
    GPU_OUT = "gpu_out"
    CHANGED = "changed"
    REFUSED_FILE = "refused_file"
    UNREGISTERED = "unregistered"
    WARNED = "warned"


@dataclass(frozen=True, slots=True)
class PoolEvent:
    """One event. ``target`` is the instance, or the pool. ``seconds``: how long the step took; for
    an instance that was lost or failed, the pause before the next start."""

    kind: InstanceEvent
    target: str
    text: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Hooks:
    """Calls that a unit makes while it starts and runs."""

    stepped: Callable[[str], None]
    """A step of a start was taken: fits, prepared, spawned, started."""
    missed: Callable[[], None]


class PoolUnit(Unit, Protocol):
    """A unit that a member keeps up."""

    @property
    def address(self) -> str:
        """The address for orchestrators; empty if they need none."""

    async def attach(self, found: Found) -> None:
        """Take hold of a unit that already runs: from now on ``stop`` ends it. Raises
        ``StartFailed`` if it has ended meanwhile."""

    async def resume(self) -> None:
        """Wait until the attached unit serves. Raises ``StartFailed``; ``stop`` follows."""

    def record(self) -> InstanceRecord:
        """The record for the next manager."""


class Member:
    """A unit with its states. To ``supervise`` it is the unit itself."""

    def __init__(
        self,
        unit: PoolUnit,
        digest: str,
        emit: Callable[[PoolEvent], None],
        changed: Callable[[], None],
        rng: random.Random,
        policy: RestartPolicy = POLICY,
    ) -> None:
        """``changed`` is called after each change of state; it must return at once."""
        self.unit = unit
        self.digest = digest
        self.state = MemberState.STARTING
        self.reason = ""
        """Why it is down; empty in other states."""
        self.restarts = 0
        self.misses = 0
        """Number of heartbeats without an answer, in all."""
        self._emit = emit
        self._changed = changed
        self._rng = rng
        self._policy = policy
        self._life: asyncio.Task[None] | None = None
        self._first: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @property
    def name(self) -> str:
        return self.unit.name

    @property
    def where(self) -> str:
        return self.unit.where

    @property
    def is_ready(self) -> bool:
        return self.state is MemberState.READY

    def begin(self, *, attached: bool = False) -> None:
        """Start the unit, or go on with the one it is attached to; from then on keep it up."""
        self._life = asyncio.create_task(self._live(attached), name=f"keep {self.name}")

    async def first_outcome(self) -> str:
        """Wait for the end of the first start: returns "" once it serves, otherwise the reason."""
        return await asyncio.shield(self._first)

    async def retire(self) -> None:
        """Make the instance not ready and stop keeping it up: ``end`` is to follow."""
        await self.leave()
        self._become(MemberState.DRAINING)

    async def end(self, drain_s: float) -> None:
        """End the instance; its work may go on for ``drain_s``. Nothing is left then.
        Idempotent."""
        await self.retire()
        await self.unit.stop(drain_s)

    async def leave(self) -> None:
        """Stop keeping the instance up; it goes on by itself."""
        life, self._life = self._life, None
        if life is not None:
            life.cancel()
            await asyncio.gather(life, return_exceptions=True)

    def missed(self) -> None:
        """Count a heartbeat without an answer."""
        self.misses += 1

    def record(self) -> InstanceRecord:
        """The record of this instance for the state file."""
        record = self.unit.record()
        record.digest, record.state = self.digest, self.state.value
        record.address, record.restarts = self.unit.address, self.restarts
        return record

    # ── supervise.Unit ───────────────────────────────────────────────────────────────────────

    async def start(self) -> None:
        self._become(MemberState.STARTING)
        self.restarts += 1
        await self._started(self.unit.start)

    async def lost(self) -> str:
        reason = await self.unit.lost()
        self._become(MemberState.DOWN, reason)
        return reason

    async def stop(self, drain_s: float) -> None:
        await self.unit.stop(drain_s)

    def kill(self) -> None:
        self.unit.kill()

    # ── its life ─────────────────────────────────────────────────────────────────────────────

    async def _live(self, attached: bool) -> None:
        failed = None
        try:
            await self._started(self.unit.resume if attached else self.unit.start)
        except StartFailed as error:
            failed = str(error)
        except Exception as error:
            pool_log.exception("an instance could not be started; it is tried again")
            failed = f"{type(error).__name__}: {error}"
            self._become(MemberState.DOWN, failed)
            self._outcome(failed)
        while True:
            try:
                await self._keep(failed)
            except Exception as error:
                # A mistake of ours must not leave an instance that nobody keeps.
                pool_log.exception("an instance could not be kept; it is started again")
                failed = f"{type(error).__name__}: {error}"
                self._become(MemberState.DOWN, failed)
                self._outcome(failed)
                await asyncio.sleep(self._policy.max_delay_s)

    async def _keep(self, failed: str | None) -> None:
        await supervise(
            self,
            self._policy,
            rng=self._rng,
            on_lost=self._on_lost,
            on_ready=lambda seconds: None,
            clock=asyncio.get_running_loop().time,
            failed=failed,
        )

    async def _started(self, begin: Callable[[], Awaitable[None]]) -> None:
        """Start or resume the unit, and note the result. Raises ``StartFailed``."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            await begin()
        except (ProvisionError, OSError) as error:
            reason = str(error)
            self._become(MemberState.DOWN, reason)
            self._outcome(reason or "it did not start")
            raise error if isinstance(error, StartFailed) else StartFailed(reason) from error
        kind = InstanceEvent.ADOPTED if begin == self.unit.resume else InstanceEvent.READY
        self._emit(PoolEvent(kind, self.name, self.where, loop.time() - began))
        self._become(MemberState.READY)
        self._outcome("")

    def _on_lost(self, reason: str, pause_s: float) -> None:
        kind = InstanceEvent.LOST if self._first.done() and not self._first.result() else None
        self._emit(PoolEvent(kind or InstanceEvent.FAILED, self.name, reason, pause_s))

    def _outcome(self, reason: str) -> None:
        if not self._first.done():
            self._first.set_result(reason)

    def _become(self, state: MemberState, reason: str = "") -> None:
        self.state, self.reason = state, reason
        self._changed()


def ports_of(found: Found) -> tuple[int, int, int]:
    """The ports of a run that was found: HTTP, gRPC, metrics; 0 if unknown."""
    numbers = [0, 0, 0]
    with contextlib.suppress(ValueError):
        for at, text in enumerate(found.label.facts.get("ports", "").split(",")[:3]):
            numbers[at] = int(text)
    return numbers[0], numbers[1], numbers[2]
