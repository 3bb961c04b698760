"""Watches GPUs while a pool runs: room before each start, and faults afterwards (PV-2)."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from catalog.errors import StartFailed
from pool.events import pool_log
from pool.fleet.specs import InstanceSpec
from pool.preflight.cpu import memory_free
from pool.preflight.need import GIB, need_of
from pool.preflight.nvml import GpuReader, GpuUnavailable
from pool.preflight.vram import VramLedger, reading
from worker.environment import DELIMITER
from worker.settings import PREFIX


class Gpus:
    """The GPUs that instances may run on. Without any, instances for the CPU still run."""

    def __init__(
        self,
        reader: GpuReader,
        heartbeat_s: float,
        now: Callable[[], float],
        on_out: Callable[[str, str], None],
    ) -> None:
        """``on_out`` is told which GPU is used no more, and why."""
        self.ledger = VramLedger(reading(reader), heartbeat_s, now)
        self._reader = reader
        self._heartbeat_s = heartbeat_s
        self._on_out = on_out
        self._changed = asyncio.Condition()
        self._is_failing = False

    async def take(self, who: str, spec: InstanceSpec, model: Path) -> tuple[str, ...]:
        """Reserve the first of the spec's groups that has room for ``who``, until ``settle``.
        Raises ``StartFailed`` with what is lacking on each."""
        if not spec.on_gpu:
            return ()
        need = need_bytes(spec, model)
        refusals = []
        for group in spec.groups:
            per_gpu = spec.vram_gib is not None
            reason = await self.ledger.refusal(who, group, need * len(group) if per_gpu else need)
            if not reason:
                return group
            refusals.append(reason)
        raise StartFailed("; ".join(refusals))

    def settle(self, who: str) -> None:
        """Note that ``who`` has loaded, or failed to: its memory is measured from now on."""
        self.ledger.settle(who)

    async def fits_beside(self, spec: InstanceSpec, model: Path) -> bool:
        """Whether an instance could start while everything else goes on. Nothing is reserved."""
        need = need_bytes(spec, model)
        if not spec.on_gpu:
            free = memory_free()
            return free is None or need < free
        who = f"{spec.name} beside"
        try:
            await self.take(who, spec, model)
        except StartFailed:
            return False
        self.ledger.settle(who)
        return True

    async def lost(self, group: Sequence[str]) -> str:
        """Wait until a GPU of the group cannot be used any more, and say why. Never for the CPU."""
        while True:
            async with self._changed:
                await self._changed.wait()
            if not group:
                continue
            try:
                devices = await self.ledger.devices()
            except GpuUnavailable:
                continue  # nobody can tell: heartbeats say whether its instance lives
            if reason := self.ledger.lost_among(group, devices):
                return reason

    async def watch(self) -> None:
        """Look for faults, once per heartbeat, until cancelled."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            await self.look()

    async def look(self) -> None:
        """Take out GPUs that broke since the last look, and make instances there notice."""
        try:
            faults = await asyncio.to_thread(self._reader.faults)
        except GpuUnavailable:
            faults = []
        except Exception:  # another version of NVIDIA's library raised it
            if not self._is_failing:
                pool_log.exception("faults of GPUs cannot be read; one that vanishes is noticed")
            self._is_failing, faults = True, []
        for fault in faults:
            if fault.is_of_device and fault.uuid and fault.uuid not in self.ledger.out:
                reason = f"the driver reported Xid {fault.xid}"
                self.ledger.take_out(fault.uuid, reason)
                self._on_out(fault.uuid, reason)
        async with self._changed:
            self._changed.notify_all()


def need_bytes(spec: InstanceSpec, model: Path) -> int:
    """Bytes that a spec will take: as it states (on each GPU), otherwise by its files (on all)."""
    if spec.vram_gib is not None:
        return int(spec.vram_gib * GIB)
    settings: dict[str, object] = {
        name.removeprefix(PREFIX).lower().replace(DELIMITER, "."): (
            int(value) if value.isdigit() else value
        )
        for name, value in spec.settings.items()
    }
    return need_of(model, settings, on_gpu=spec.on_gpu).total
