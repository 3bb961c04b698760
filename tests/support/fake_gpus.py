"""GPUs that a test fills and takes away."""

from pool.fleet.gpus import GIB
from pool.preflight.nvml import GpuDevice, GpuUnavailable


class FakeGpus:
    """As ``read_gpus``. ``free``: GiB by UUID, of 80 each."""

    def __init__(self, *free: float) -> None:
        self.free = {f"GPU-{index}": gib for index, gib in enumerate(free)}
        self.is_there = True
        self.looks = 0

    def __call__(self) -> list[GpuDevice]:
        self.looks += 1
        if not self.is_there:
            raise GpuUnavailable("NVIDIA's driver does not answer")
        return [
            GpuDevice(uuid[4:], uuid, 80 * GIB, int(gib * GIB)) for uuid, gib in self.free.items()
        ]
