"""GPUs that a test fills, breaks and takes away."""

from pool.fleet.gpus import GIB
from pool.preflight.nvml import GpuDevice, GpuFault, GpuUnavailable


class FakeGpus:
    """As ``Nvml``. ``free``: GiB by UUID, of 80 each."""

    def __init__(self, *free: float) -> None:
        self.free = {f"GPU-{index}": gib for index, gib in enumerate(free)}
        self.pending: list[GpuFault] = []
        self.is_there = True
        self.looks = 0
        self.parts: dict[str, str] = {}
        """MIG devices, by UUID: the UUID of their GPU."""

    def devices(self) -> list[GpuDevice]:
        self.looks += 1
        if not self.is_there:
            raise GpuUnavailable("NVIDIA's driver does not answer")
        return [
            GpuDevice(uuid[4:], uuid, "Fake", 80 * GIB, int(gib * GIB), self.parts.get(uuid, ""))
            for uuid, gib in self.free.items()
        ]

    def faults(self) -> list[GpuFault]:
        found, self.pending = self.pending, []
        return found
