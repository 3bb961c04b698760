"""Reads GPUs through NVIDIA's management library (PV-2).

The code that uses these readings is tested without a GPU. The library is the optional package
``nvidia-ml-py``; it needs neither torch nor a context on a device.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

from worker.extras import pip_install


class GpuUnavailable(Exception):
    """GPUs cannot be read; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class GpuDevice:
    """One GPU, or one MIG device of a GPU."""

    index: str
    """The number in ``CUDA_VISIBLE_DEVICES``; for MIG, ``GPU:DEVICE`` with both numbers."""
    uuid: str
    total_bytes: int
    free_bytes: int

    def is_called(self, device: str) -> bool:
        """Whether ``device`` names it by its number, its UUID, or a prefix of the UUID."""
        if device == self.index or device == self.uuid:
            return True
        return device.startswith(("GPU-", "MIG-")) and self.uuid.startswith(device)


def read_gpus() -> list[GpuDevice]:
    """All GPUs except lost ones. May take some ms. Raises ``GpuUnavailable``."""
    try:
        import pynvml as nvml
    except ImportError:
        raise GpuUnavailable(f"nvidia-ml-py is not installed: {pip_install('gpu')}") from None
    try:
        nvml.nvmlInit()  # does nothing from the second time on
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        raise GpuUnavailable(
            f"NVIDIA's driver does not answer ({error}); nvidia-smi says more"
        ) from None
    found: list[GpuDevice] = []
    for index in range(count):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            parts = _mig_devices(nvml, handle)
            if parts is None:
                found.append(_device(nvml, handle, str(index)))
            else:
                found += [_device(nvml, p, f"{index}:{at}") for at, p in enumerate(parts)]
        except nvml.NVMLError:
            continue  # lost, or being reset
    return found


def _mig_devices(nvml: Any, handle: Any) -> list[Any] | None:
    """The MIG devices of a partitioned GPU; None for any other."""
    try:
        mode, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError:
        return None
    if mode != nvml.NVML_DEVICE_MIG_ENABLE:
        return None
    parts = []
    for at in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with contextlib.suppress(nvml.NVMLError):
            parts.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, at))
    return parts


def _device(nvml: Any, handle: Any, index: str) -> GpuDevice:
    memory, uuid = nvml.nvmlDeviceGetMemoryInfo(handle), nvml.nvmlDeviceGetUUID(handle)
    text = uuid.decode() if isinstance(uuid, bytes) else uuid  # bytes in older versions
    return GpuDevice(index, text, memory.total, memory.free)
