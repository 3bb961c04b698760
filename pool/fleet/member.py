"""One instance of a pool: from its first start, or its adoption, to its end.

An instance is never given up: one that keeps failing is started again once a minute, and the others
go on.
"""

import contextlib
import math
import random
from collections.abc import Callable
from typing import Protocol

from pool.events import EventKind, PoolEvent
from pool.fleet.home import InstanceRecord
from pool.process.detached import Found
from pool.supervise import RestartPolicy, Supervised, Unit, UnitState

POLICY = RestartPolicy(
    first_delay_s=0.5, max_delay_s=60.0, max_failures=math.inf, stable_s=60.0, first_too=True
)


OnStep = Callable[[str], None]
"""Told of each step of a start: fits, prepared, spawned, started."""


class PoolUnit(Unit, Protocol):
    """A unit that a member keeps up."""

    @property
    def misses(self) -> int:
        """Number of heartbeats without an answer, in all."""

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


class Member(Supervised):
    """A unit of the pool, with its record for the next manager."""

    unit: PoolUnit

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
        super().__init__(unit, emit, rng, policy)
        self.digest = digest
        self._changed = changed

    def resume(self) -> None:
        """Go on with the unit that this is attached to, and keep it up from then on."""
        self._begin(self.unit.resume, EventKind.ADOPTED)

    def record(self) -> InstanceRecord:
        """The record of this instance for the state file."""
        record = self.unit.record()
        record.digest, record.state = self.digest, self.state.value
        record.address, record.restarts = self.unit.address, self.restarts
        return record

    def _become(self, state: UnitState, reason: str = "") -> None:
        super()._become(state, reason)
        self._changed()


def ports_of(found: Found) -> tuple[int, int, int]:
    """The ports of a run that was found: HTTP, gRPC, metrics; 0 if unknown."""
    numbers = [0, 0, 0]
    with contextlib.suppress(ValueError):
        for at, text in enumerate(found.label.facts.get("ports", "").split(",")[:3]):
            numbers[at] = int(text)
    return numbers[0], numbers[1], numbers[2]
