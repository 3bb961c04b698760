"""Reads GPUs through NVIDIA's management library: memory and faults (PV-2).

The code that uses these readings is tested without a GPU. The library is the optional package
``nvidia-ml-py``; it needs neither torch nor a context on a device.
"""

import contextlib
from dataclasses import dataclass
from typing import Any

from worker.extras import pip_install

APPLICATION_XIDS = frozenset({13, 31, 43, 45, 68, 109})
"""Xids caused by a program, not the device: its instance may crash, but the GPU is healthy."""


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
    gpu: str = ""
    """UUID of a MIG device's GPU, under which its faults are reported; otherwise empty."""

    def is_called(self, device: str) -> bool:
        """Whether ``device`` names it by its number, its UUID, or a prefix of the UUID."""
        if device == self.index or device == self.uuid:
            return True
        return device.startswith(("GPU-", "MIG-")) and self.uuid.startswith(device)


@dataclass(frozen=True, slots=True)
class GpuFault:
    """A fault of a GPU. ``xid`` is NVIDIA's error number."""

    uuid: str
    xid: int

    @property
    def is_of_device(self) -> bool:
        """Whether the GPU should be taken out of use."""
        return self.xid not in APPLICATION_XIDS


class Nvml:
    """NVIDIA's library, opened at the first request for devices, because a pool on the CPU does not
    need it. Calls may take some ms; only one thread at a time may call ``faults``."""

    def __init__(self) -> None:
        self._nvml: Any = None
        self._events: Any = None
        self._registered: set[str] = set()

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
                    gpu = self._uuid(handle)
                    found += [self._device(p, f"{index}:{at}", gpu) for at, p in enumerate(parts)]
            except nvml.NVMLError:
                continue  # lost, or being reset
        return found

    def faults(self) -> list[GpuFault]:
        """The faults since the last call. Raises ``GpuUnavailable``."""
        nvml, faults = self._nvml, list[GpuFault]()
        if nvml is None:
            return faults
        try:
            self._register()
            while True:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                uuid = ""
                with contextlib.suppress(nvml.NVMLError):  # a device that has fallen off the bus
                    uuid = self._uuid(event.device)
                faults.append(GpuFault(uuid, int(event.eventData)))
        except nvml.NVMLError as error:
            no_more = (nvml.NVML_ERROR_TIMEOUT, nvml.NVML_ERROR_NOT_SUPPORTED)
            if faults or error.value in no_more:
                return faults
            raise GpuUnavailable(f"NVIDIA's driver reports no events ({error})") from None

    def _register(self) -> None:
        """Register for events of every GPU, including new ones."""
        nvml = self._nvml
        if self._events is None:
            self._events = nvml.nvmlEventSetCreate()
        for index in range(nvml.nvmlDeviceGetCount()):
            with contextlib.suppress(nvml.NVMLError):
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = self._uuid(handle)
                if uuid not in self._registered:
                    xids = nvml.nvmlEventTypeXidCriticalError
                    nvml.nvmlDeviceRegisterEvents(handle, xids, self._events)
                    self._registered.add(uuid)

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

    def _device(self, handle: Any, index: str, gpu: str = "") -> GpuDevice:
        memory = self._nvml.nvmlDeviceGetMemoryInfo(handle)
        name = _text(self._nvml.nvmlDeviceGetName(handle))
        return GpuDevice(index, self._uuid(handle), name, memory.total, memory.free, gpu)

    def _uuid(self, handle: Any) -> str:
        return _text(self._nvml.nvmlDeviceGetUUID(handle))


def _text(value: str | bytes) -> str:
    """``value`` as text: older versions of the package return bytes."""
    return value.decode() if isinstance(value, bytes) else value
