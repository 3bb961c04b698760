"""The GPUs for instances: checks free memory before a start, and faults afterwards (PV-2).

NVML's answers are cached for at most one heartbeat. Two instances that start at the same time would
both see the same free memory, so each one's need is reserved until it has loaded.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from catalog.errors import StartFailed
from pool.events import pool_log
from pool.fleet.specs import InstanceSpec
from pool.preflight.need import GIB, need_of
from pool.preflight.nvml import GpuDevice, GpuUnavailable, Nvml
from worker.free_memory import memory_free
from worker.settings import variable

_LARGEST_TTL_S = 15.0
_HEEDED = ("engine", "dtype", "kv.blocks")
"""Worker settings that decide how much memory it needs."""


class Gpus:
    """The GPUs of this machine, their free memory, and GPUs that are out of use. Without a GPU,
    instances for the CPU still run."""

    def __init__(
        self,
        reader: Nvml,
        heartbeat_s: float,
        now: Callable[[], float],
        on_out: Callable[[str, str], None],
    ) -> None:
        """``on_out`` gets each GPU that is taken out of use, and the reason."""
        self.hits = self.misses = 0
        """How often a cached answer was fresh, and how often it was not."""
        self.out: dict[str, str] = {}
        """GPUs that are out of use, by UUID, with the reason."""
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
        """All GPUs; the data is at most one heartbeat old. Raises ``GpuUnavailable``."""
        async with self._reading:
            ttl_s = min(self._heartbeat_s, _LARGEST_TTL_S)
            if self._read_at is not None and self._now() - self._read_at < ttl_s:
                self.hits += 1
                return self._devices
            self.misses += 1
            # NVML blocks on the driver.
            self._devices = await asyncio.to_thread(self._reader.devices)
            self._read_at = self._now()
            return self._devices

    async def take(self, who: str, spec: InstanceSpec, model: Path) -> tuple[str, ...]:
        """Reserve the first group of the spec that has room for ``who``, until ``settle``.
        Raises ``StartFailed`` with the missing memory of each group."""
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
        """Why ``who`` cannot have ``share`` bytes on each GPU of ``group``. If it can, reserve them
        and return an empty string."""
        try:
            devices = await self.devices()
        except GpuUnavailable as error:
            return f"no GPU can be looked at: {error}"
        taken: list[str] = []
        others = [reserved for other, reserved in self._reserved.items() if other != who]
        for wanted in group:
            device = _called(wanted, devices)
            if device is None:
                there = ", ".join(d.index for d in devices) or "none"
                return f"there is no GPU {wanted}; available: {there}"
            if reason := self._why_out(wanted, device):
                return reason
            free = device.free_bytes - sum(b for uuids, b in others if device.uuid in uuids)
            if share > free:
                return (
                    f"it needs {share / GIB:.1f} GiB on GPU {wanted}, where "
                    f"{max(free, 0) / GIB:.1f} GiB of {device.total_bytes / GIB:.1f} GiB are free;"
                    " set vram_gib if it needs less, or give it another GPU"
                )
            taken.append(device.uuid)
        self._reserved[who] = (tuple(taken), share)
        return ""

    def settle(self, who: str) -> None:
        """Drop the reservation of ``who`` after its load or failure; NVML now shows its memory."""
        if self._reserved.pop(who, None) is not None:
            self._read_at = None

    async def fits_beside(self, spec: InstanceSpec, model: Path) -> bool:
        """Whether an instance could start alongside all others. Reserves nothing."""
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
        """Value for ``CUDA_VISIBLE_DEVICES``: UUIDs, because CUDA may number GPUs differently."""
        devices = await self.devices()
        found = {wanted: _called(wanted, devices) for wanted in group}
        return ",".join(device.uuid if device else wanted for wanted, device in found.items())

    # ── faults ───────────────────────────────────────────────────────────────────────────────

    async def lost(self, group: Sequence[str]) -> str:
        """Wait until a GPU of the group is unusable; return why. Never returns for the CPU."""
        while True:
            async with self._changed:
                await self._changed.wait()
            if not group:
                continue
            try:
                devices = await self.devices()
            except GpuUnavailable:
                continue  # unknown: heartbeats show whether its instance is alive
            for wanted in group:
                device = _called(wanted, devices)
                if device is None:
                    return f"GPU {wanted} has vanished"
                if reason := self._why_out(wanted, device):
                    return reason

    async def watch(self) -> None:
        """Check for faults once per heartbeat, until cancelled."""
        while True:
            await asyncio.sleep(self._heartbeat_s)
            await self.look()

    async def look(self) -> None:
        """Take GPUs with new faults out of use, and wake the watchers of their instances."""
        try:
            faults = await asyncio.to_thread(self._reader.faults)
        except GpuUnavailable:
            faults = []
        except Exception:  # another version of NVIDIA's library raised it
            if not self._is_failing:
                pool_log.exception("cannot read GPU faults; a GPU that vanishes is still noticed")
            self._is_failing, faults = True, []
        for fault in faults:
            if fault.is_of_device and fault.uuid and fault.uuid not in self.out:
                reason = self.out[fault.uuid] = f"the driver reported Xid {fault.xid}"
                self._on_out(fault.uuid, reason)
        async with self._changed:
            self._changed.notify_all()

    def restore(self) -> None:
        """Use every GPU again, after an operator has said that they work."""
        self.out.clear()
        self._read_at = None

    def _why_out(self, wanted: str, device: GpuDevice) -> str:
        reason = self.out.get(device.uuid) or self.out.get(device.gpu)
        return f"GPU {wanted} is taken out: {reason}" if reason else ""


def _called(wanted: str, devices: Sequence[GpuDevice]) -> GpuDevice | None:
    return next((device for device in devices if device.is_called(wanted)), None)


def need_bytes(spec: InstanceSpec, model: Path) -> int:
    """Bytes that a spec needs: its stated need (on each GPU), else from its files (on all)."""
    if spec.vram_gib is not None:
        return int(spec.vram_gib * GIB)
    engine, dtype, blocks = (spec.settings.get(variable(name), "") for name in _HEEDED)
    kv_blocks = int(blocks) if blocks.isdigit() else 0
    return need_of(model, engine, dtype, kv_blocks, on_gpu=spec.on_gpu)
