"""The GPUs that instances may run on: room before each start, and faults afterwards (PV-2).

NVML's answers are kept for at most a heartbeat. Two instances that start at once would both see the
same free memory, so each one's need is reserved until it has loaded.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from catalog.errors import StartFailed
from pool.events import pool_log
from pool.fleet.specs import InstanceSpec
from pool.preflight.need import GIB, need_of
from pool.preflight.nvml import GpuDevice, GpuUnavailable, Nvml
from worker.environment import DELIMITER
from worker.free_memory import memory_free
from worker.settings import PREFIX

_LARGEST_TTL_S = 15.0


class Gpus:
    """The GPUs of this machine, their free memory, and those that are not to be used. Without any,
    instances for the CPU still run."""

    def __init__(
        self,
        reader: Nvml,
        heartbeat_s: float,
        now: Callable[[], float],
        on_out: Callable[[str, str], None],
    ) -> None:
        """``on_out`` gets each GPU that is taken out, and why."""
        self.hits = self.misses = 0
        """How often a cached answer was still fresh, and was not."""
        self.out: dict[str, str] = {}
        """GPUs that are taken out, by UUID, with the reason."""
        self._reader = reader
        self._heartbeat_s = heartbeat_s
        self._now = now
        self._on_out = on_out
        self._devices: list[GpuDevice] = []
        self._read_at: float | None = None
        self._reading = asyncio.Lock()
        self._reserved: dict[str, tuple[tuple[str, ...], int]] = {}
        self._changed = asyncio.Condition()
        self._is_failing = False

    # ── room ─────────────────────────────────────────────────────────────────────────────────

    async def devices(self) -> list[GpuDevice]:
        """All GPUs, as of at most one heartbeat ago. Raises ``GpuUnavailable``."""
        async with self._reading:
            ttl_s = min(self._heartbeat_s, _LARGEST_TTL_S)
            if self._read_at is not None and self._now() - self._read_at < ttl_s:
                self.hits += 1
                return self._devices
            self.misses += 1
            # NVML waits for the driver.
            self._devices = await asyncio.to_thread(self._reader.devices)
            self._read_at = self._now()
            return self._devices

    async def take(self, who: str, spec: InstanceSpec, model: Path) -> tuple[str, ...]:
        """Reserve the first of the spec's groups that has room for ``who``, until ``settle``.
        Raises ``StartFailed`` with what is lacking on each."""
        if not spec.on_gpu:
            return ()
        need = need_bytes(spec, model)
        refusals = []
        for group in spec.groups:
            share = need if spec.vram_gib is not None else -(-need // len(group))
            reason = await self.refusal(who, group, share)
            if not reason:
                return group
            refusals.append(reason)
        raise StartFailed("; ".join(refusals))

    async def refusal(self, who: str, group: Sequence[str], share: int) -> str:
        """Why ``who`` cannot have ``share`` bytes on each GPU of ``group``; empty if it can, and
        then they are reserved for it."""
        try:
            devices = await self.devices()
        except GpuUnavailable as error:
            return f"no GPU can be looked at: {error}"
        taken: list[str] = []
        for wanted in group:
            device = _called(wanted, devices)
            if device is None:
                there = ", ".join(d.index for d in devices) or "none"
                return f"there is no GPU {wanted}; available: {there}"
            if reason := self._why_out(device):
                return f"GPU {wanted} is taken out: {reason}"
            others = (uuids for other, uuids in self._reserved.items() if other != who)
            free = device.free_bytes - sum(b for uuids, b in others if device.uuid in uuids)
            if share > free:
                return (
                    f"it needs {share / GIB:.1f} GiB on GPU {wanted}, where "
                    f"{max(free, 0) / GIB:.1f} GiB of {device.total_bytes / GIB:.1f} GiB are free;"
                    " say vram_gib if it needs less, or give it another GPU"
                )
            taken.append(device.uuid)
        self._reserved[who] = (tuple(taken), share)
        return ""

    def settle(self, who: str) -> None:
        """Note that ``who`` has loaded, or failed to: its memory is measured from now on."""
        if self._reserved.pop(who, None) is not None:
            self._read_at = None

    async def fits_beside(self, spec: InstanceSpec, model: Path) -> bool:
        """Whether an instance could start next to everything else. Nothing is reserved."""
        if not spec.on_gpu:
            free = memory_free()
            return free is None or need_bytes(spec, model) < free
        who = f"{spec.name} next to"
        try:
            await self.take(who, spec, model)
        except StartFailed:
            return False
        self.settle(who)
        return True

    async def visible(self, group: Sequence[str]) -> str:
        """Value for ``CUDA_VISIBLE_DEVICES``: UUIDs, since CUDA may count in another order."""
        devices = await self.devices()
        found = ((wanted, _called(wanted, devices)) for wanted in group)
        return ",".join(wanted if device is None else device.uuid for wanted, device in found)

    # ── faults ───────────────────────────────────────────────────────────────────────────────

    async def lost(self, group: Sequence[str]) -> str:
        """Wait until a GPU of the group cannot be used any more, and say why. Never for the CPU."""
        while True:
            async with self._changed:
                await self._changed.wait()
            if not group:
                continue
            try:
                devices = await self.devices()
            except GpuUnavailable:
                continue  # unknown: heartbeats say whether its instance lives
            for wanted in group:
                device = _called(wanted, devices)
                if device is None:
                    return f"GPU {wanted} has vanished"
                if reason := self._why_out(device):
                    return f"GPU {wanted} is taken out: {reason}"

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
            if fault.is_of_device and fault.uuid and fault.uuid not in self.out:
                self.out[fault.uuid] = f"the driver reported Xid {fault.xid}"
                self._on_out(fault.uuid, self.out[fault.uuid])
        async with self._changed:
            self._changed.notify_all()

    def restore(self) -> None:
        """Use every GPU again, when an operator says that they work."""
        self.out.clear()
        self._read_at = None

    def _why_out(self, device: GpuDevice) -> str:
        return self.out.get(device.uuid) or self.out.get(device.gpu, "")


def _called(wanted: str, devices: Sequence[GpuDevice]) -> GpuDevice | None:
    return next((device for device in devices if device.is_called(wanted)), None)


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
    return need_of(model, settings, on_gpu=spec.on_gpu)
