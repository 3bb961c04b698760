"""Decides whether an instance fits on its GPUs, by measured memory and reservations (PV-2).

NVML's answers are kept for at most a heartbeat. Two instances that start at once would both see the
same free memory, so each one's need is reserved until it has loaded.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from pool.preflight.need import GIB
from pool.preflight.nvml import GpuDevice, GpuReader, GpuUnavailable

Read = Callable[[], Awaitable[list[GpuDevice]]]
_LARGEST_TTL_S = 15.0


@dataclass(slots=True)
class CacheCounts:
    """Counts of how often a cached answer was still fresh."""

    hits: int = 0
    misses: int = 0

    @property
    def hit_rate(self) -> float:
        """Share of fresh answers; 0 before the first request."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else 0.0


class VramLedger:
    """The GPUs of this machine, their free memory, and those that are not to be used."""

    def __init__(self, read: Read, heartbeat_s: float, now: Callable[[], float]) -> None:
        self.counts = CacheCounts()
        self.out: dict[str, str] = {}
        """GPUs that are taken out, by UUID, with the reason."""
        self._read = read
        self._ttl_s = min(heartbeat_s, _LARGEST_TTL_S)
        self._now = now
        self._devices: list[GpuDevice] = []
        self._read_at: float | None = None
        self._reading = asyncio.Lock()
        self._reserved: dict[str, tuple[tuple[str, ...], int]] = {}

    async def devices(self) -> list[GpuDevice]:
        """All GPUs, as of at most one heartbeat ago. Raises ``GpuUnavailable``."""
        async with self._reading:
            if self._read_at is not None and self._now() - self._read_at < self._ttl_s:
                self.counts.hits += 1
                return self._devices
            self.counts.misses += 1
            self._devices = await self._read()
            self._read_at = self._now()
            return self._devices

    async def refusal(self, who: str, group: Sequence[str], need_bytes: int) -> str:
        """Why ``who`` cannot run on the GPUs of ``group``, each of which is to carry its share of
        ``need_bytes``; empty if it can, and then that much is reserved for it."""
        try:
            devices = await self.devices()
        except GpuUnavailable as error:
            return f"no GPU can be looked at: {error}"
        share = -(-need_bytes // len(group))
        taken: list[str] = []
        for wanted in group:
            device = next((d for d in devices if d.is_called(wanted)), None)
            if device is None:
                there = ", ".join(d.index for d in devices) or "none"
                return f"there is no GPU {wanted}; available: {there}"
            if reason := self._why_out(device):
                return f"GPU {wanted} is taken out: {reason}"
            free = device.free_bytes - self._promised(device.uuid, but=who)
            if share > free:
                return (
                    f"it needs {_gib(share)} on GPU {wanted}, where {_gib(max(free, 0))} of "
                    f"{_gib(device.total_bytes)} are free; say vram_gib if it needs less, or give "
                    "it another GPU"
                )
            taken.append(device.uuid)
        self._reserved[who] = (tuple(taken), share)
        return ""

    def settle(self, who: str) -> None:
        """Drop the reservation of ``who``, which has loaded or failed: its memory is measured
        now."""
        if self._reserved.pop(who, None) is not None:
            self._read_at = None

    def lost_among(self, group: Sequence[str], devices: Sequence[GpuDevice]) -> str:
        """Why an instance on ``group`` cannot go on, given ``devices``; empty if it can."""
        for wanted in group:
            device = next((d for d in devices if d.is_called(wanted)), None)
            if device is None:
                return f"GPU {wanted} has vanished"
            if reason := self._why_out(device):
                return f"GPU {wanted} is taken out: {reason}"
        return ""

    async def visible(self, group: Sequence[str]) -> str:
        """Value for ``CUDA_VISIBLE_DEVICES``: UUIDs, since CUDA may count in another order."""
        devices = await self.devices()
        found = (next((d for d in devices if d.is_called(wanted)), None) for wanted in group)
        return ",".join(w if d is None else d.uuid for w, d in zip(group, found, strict=True))

    def take_out(self, uuid: str, reason: str) -> None:
        """Use a GPU no more, until ``restore``."""
        self.out[uuid] = reason

    def restore(self) -> None:
        """Use every GPU again, as when an operator says that they are mended."""
        self.out.clear()
        self._read_at = None

    def _why_out(self, device: GpuDevice) -> str:
        return self.out.get(device.uuid) or self.out.get(device.gpu, "")

    def _promised(self, uuid: str, *, but: str) -> int:
        return sum(
            share for who, (uuids, share) in self._reserved.items() if who != but and uuid in uuids
        )


def reading(reader: GpuReader) -> Read:
    """Read off the event loop: NVML waits for the driver."""

    async def read() -> list[GpuDevice]:
        return await asyncio.to_thread(reader.devices)

    return read


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
