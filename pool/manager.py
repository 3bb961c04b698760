"""Keeps a pool's instances in the state that its file defines (PV-1).

    pool.toml ─▶ specs ─▶ Manager ─┬─ unit ─ guardian ─ tritonserver     each detached: they
                                    └─ unit ─ guardian ─ tritonserver     outlive the manager
                                                            or llama.cpp's server

After a kill, the next manager takes over the running instances (``recover``). A new file changes
only the instances that differ (``apply``).
"""

import asyncio
import contextlib
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from catalog.errors import StartFailed
from pool.events import EventKind, PoolEvent
from pool.fleet.home import InstanceRecord, PoolHome, PoolState
from pool.fleet.specs import AnySpec
from pool.fleet.units import PoolMachine
from pool.process.process import FoundRun, OnStep
from pool.supervise import ProcessUnit, RestartPolicy, Supervised

if TYPE_CHECKING:  # it imports an HTTP library, which a launch does not need
    from pool.fleet.registrar import Registrar

POOL = "pool"
"""Target of events that concern the whole pool."""
POLICY = RestartPolicy(
    first_delay_s=0.5, max_delay_s=60.0, max_failures=math.inf, stable_s=60.0, first_too=True
)
"""A pool never gives up an instance: one that keeps failing is restarted once a minute."""
RECOVER_S = 5.0
"""Seconds for running instances to answer before orchestrators get the list."""
TELL_S = 2.0
"""Seconds to tell orchestrators that an instance leaves; after that, it is drained anyway."""


@dataclass(eq=False)
class Manager:
    """All members of one pool."""

    machine: PoolMachine
    emit: Callable[[PoolEvent], None]
    """Gets events; it must return at once and never raise."""
    drain_s: float
    """Seconds for running work."""
    policy: RestartPolicy = POLICY
    home: PoolHome | None = None
    """Stores the state."""
    registrar: "Registrar | None" = None
    """Updates orchestrators."""
    state: PoolState = field(default_factory=PoolState)
    """The last manager's, then ours."""
    members: dict[str, Supervised] = field(default_factory=dict, init=False)
    incoming: dict[str, Supervised] = field(default_factory=dict, init=False)
    """Replacements, by the name of the member that each replaces."""
    _rng: random.Random = field(default_factory=random.Random, init=False)
    _applying: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _is_failing: bool = field(default=False, init=False)
    _is_recovering: bool = field(default=False, init=False)

    # ── orders ───────────────────────────────────────────────────────────────────────────────

    async def recover(self, specs: Mapping[str, AnySpec]) -> None:
        """Take over running instances. Call it once, before anything else; then call ``apply``."""
        spare = []
        for found in self.machine.found():
            name = found.label.unit
            spec = specs.get(name)
            if (member := await self._attached(found, spec)) is None:
                continue
            if name not in self.members:
                self.members[name] = member
            elif self._is_current(found, spec):
                spare.append(self.members[name])
                self.members[name] = member
            else:
                spare.append(member)
        # Reporting them one by one would look as if the others had gone.
        self._is_recovering = True
        for member in self.members.values():
            member.begin(adopted=True)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(RECOVER_S):
                await asyncio.gather(*(m.first_outcome() for m in self.members.values()))
        self._is_recovering = False
        self._changed()
        # Of two with the same name, one was about to replace the other. End the spare one.
        await asyncio.gather(*(self._end(member) for member in spare))

    async def apply(self, specs: Mapping[str, AnySpec]) -> None:
        """Run these instances and no others; instances that match are not touched."""
        async with self._applying:
            gone = [name for name in self.members if name not in specs]
            new = [spec for name, spec in specs.items() if name not in self.members]
            stay = [name for name in specs if name in self.members]
            changed = [name for name in stay if self.members[name].digest != specs[name].digest]
            if gone or changed or new:
                text = f"{len(new)} to start, {len(changed)} to replace, {len(gone)} to end"
                self.emit(PoolEvent(EventKind.CHANGED, POOL, text))
            for spec in new:
                self.add(spec)
            await asyncio.gather(
                *(self.remove(name) for name in gone),
                *(self.replace(name, specs[name]) for name in changed),
            )

    def add(self, spec: AnySpec) -> Supervised:
        """Start one more instance, and keep it up."""
        kept = self.state.instances.get(spec.name)
        unit = self.machine.make(spec, kept, self._on_step(spec.name))
        member = self._member(unit, spec.digest)
        self.members[spec.name] = member
        self._save()
        member.begin()
        return member

    async def remove(self, name: str) -> None:
        """Drain an instance and end it."""
        member = self.members[name]
        await self._end(member)
        if self.members.get(name) is member:
            del self.members[name]
            self.state.instances.pop(name, None)
        self._save()

    async def replace(self, name: str, spec: AnySpec) -> bool:
        """Replace an instance by ``spec``; return whether the new one serves.

        If memory and ports allow it, the new instance starts first, and the old one stays if the
        start fails. Otherwise the old one ends first.
        """
        old = self.members[name]
        self.emit(PoolEvent(EventKind.REPLACING, name))
        if old.is_ready and await self.machine.fits_beside(spec):
            unit = self.machine.make(spec, None, self._on_step(name))
            new = self._member(unit, spec.digest)
            self.incoming[name] = new
            new.begin()
            try:
                reason = await new.first_outcome()
                if reason:
                    await new.end(0.0)
                    self.emit(PoolEvent(EventKind.KEPT, name, reason))
                    return False
                self.members[name] = new
            except asyncio.CancelledError:
                await asyncio.shield(new.end(0.0))
                raise
            finally:
                del self.incoming[name]
            self._save()
            await self._end(old)
            return True
        kept = self.state.instances.get(name)
        await self.remove(name)
        if kept is not None:
            self.state.instances[name] = kept  # its ports
        member = self.add(spec)
        return not await member.first_outcome()

    async def stop(self, drain_s: float) -> None:
        """End every instance."""
        await asyncio.gather(*(self._end(member, drain_s) for member in self._everyone))
        self.members.clear()
        self.state.instances.clear()
        self._save()

    def kill(self) -> None:
        """Cut ``stop`` short: send SIGKILL to everything now."""
        for member in self._everyone:
            member.unit.kill()

    async def leave(self) -> None:
        """Stop supervising; all instances keep running for the next manager."""
        self._save()
        await asyncio.gather(*(member.leave() for member in self._everyone))

    @property
    def _everyone(self) -> list[Supervised]:
        return [*self.members.values(), *self.incoming.values()]

    # ── members ──────────────────────────────────────────────────────────────────────────────

    def _is_current(self, found: FoundRun, spec: AnySpec | None) -> bool:
        """Whether this run, of two with the same name, is the one that served: according to the
        state or, if that is lost, because it matches the spec."""
        record = self.state.instances.get(found.label.unit)
        if record and record.mark:
            return record.mark == found.label.mark
        return spec is not None and spec.digest == found.label.facts.get("digest")

    async def _attached(self, found: FoundRun, spec: AnySpec | None) -> Supervised | None:
        """A member that is attached to a found run; None if the run has ended."""
        digest, on_step = found.label.facts.get("digest", ""), self._on_step(found.label.unit)
        if spec is not None and spec.digest == digest:
            unit = self.machine.make(spec, InstanceRecord(ports=found.ports), on_step)
        else:
            unit = self.machine.make_former(found, on_step)
        try:
            await unit.attach(found)
        except (StartFailed, TimeoutError):
            return None
        member = self._member(unit, digest)
        kept = self.state.instances.get(found.label.unit)
        member.restarts = kept.restarts if kept else 0
        return member

    def _member(self, unit: ProcessUnit, digest: str) -> Supervised:
        return Supervised(unit, digest, self.emit, self._changed, self._rng, self.policy)

    def _on_step(self, name: str) -> OnStep:
        events = {"fits": EventKind.FITS, "started": EventKind.SPAWNED}

        def stepped(step: str) -> None:
            if step in events:
                self.emit(PoolEvent(events[step], name))
            self._save()

        return stepped

    async def _end(self, member: Supervised, drain_s: float | None = None) -> None:
        now = asyncio.get_running_loop().time
        began = now()
        self.emit(PoolEvent(EventKind.STOPPING, member.name))
        was_ready = member.is_ready
        await member.retire()
        if was_ready:
            await self.told()
        await member.end(self.drain_s if drain_s is None else drain_s)
        self.emit(PoolEvent(EventKind.STOPPED, member.name, seconds=now() - began))

    # ── updates to others ────────────────────────────────────────────────────────────────────

    def _changed(self) -> None:
        if not self._is_recovering and self.registrar is not None:
            self.registrar.set_ready(self.ready_addresses)
        self._save()

    async def told(self) -> None:
        """Wait until orchestrators know the ready instances, or for ``TELL_S``."""
        if self.registrar is not None:
            await self.registrar.wait_told(TELL_S)

    @property
    def ready_addresses(self) -> frozenset[str]:
        """Addresses of all instances that can accept work now."""
        return frozenset(m.unit.address for m in self._everyone if m.is_ready and m.unit.address)

    def _save(self) -> None:
        """Save the state for the next manager. A failure does not stop the service."""
        for name, member in self.members.items():
            self.state.instances[name] = InstanceRecord(
                digest=member.digest,
                ports=member.unit.all_ports,
                mark=member.unit.mark,
                state=member.state.value,
                pid=member.unit.pid,
                address=member.unit.address,
                restarts=member.restarts,
            )
        if self.home is None:
            return
        try:
            self.home.write(self.state)
            self._is_failing = False
        except OSError as error:
            if not self._is_failing:
                text = f"the state cannot be written: {error}; ports may change at the next start"
                self.emit(PoolEvent(EventKind.WARNED, POOL, text))
            self._is_failing = True
