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
    name: str
    total_bytes: int
    free_bytes: int

    def is_called(self, device: str) -> bool:
        """Whether ``device`` names it by its number, its UUID, or a prefix of the UUID."""
        if device == self.index or device == self.uuid:
            return True
        return device.startswith(("GPU-", "MIG-")) and self.uuid.startswith(device)


class Nvml:
    """NVIDIA's library, opened at the first request for devices, because a pool on the CPU does not
    need it. Calls may take some ms."""

    def __init__(self) -> None:
        self._nvml: Any = None

    def _open(self) -> None:
        """Open the library. Raises ``GpuUnavailable``."""
        try:
            import pynvml
        except ImportError:
            raise GpuUnavailable(f"nvidia-ml-py is not installed: {pip_install('gpu')}") from None
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise GpuUnavailable(
                f"NVIDIA's driver does not answer ({error}); nvidia-smi says more"
            ) from None
        self._nvml = pynvml

    def devices(self) -> list[GpuDevice]:
        """All GPUs except lost ones. Raises ``GpuUnavailable``."""
        if self._nvml is None:
            self._open()
        nvml = self._nvml
        found: list[GpuDevice] = []
        try:
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            raise GpuUnavailable(f"NVIDIA's driver does not count GPUs ({error})") from None
        for index in range(count):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                parts = self._mig_devices(handle)
                if parts is None:
                    found.append(self._device(handle, str(index)))
                else:
                    found += [self._device(p, f"{index}:{at}") for at, p in enumerate(parts)]
            except nvml.NVMLError:
                continue  # lost, or being reset
        return found

    def _mig_devices(self, handle: Any) -> list[Any] | None:
        """The MIG devices of a partitioned GPU; None for any other."""
        nvml = self._nvml
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

    def _device(self, handle: Any, index: str) -> GpuDevice:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        name = _text(self._nvml.nvmlDeviceGetName(handle))
        uuid = _text(self._nvml.nvmlDeviceGetUUID(handle))
        return GpuDevice(index, uuid, name, memory.total, memory.free)


def _text(value: str | bytes) -> str:
    """``value`` as text: older versions of the package return bytes."""
    return value.decode() if isinstance(value, bytes) else value
