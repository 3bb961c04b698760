"""NVIDIA's library, played by a module of the same surface.

No real one was ever asked: this machine has no GPU.
"""

import sys
from collections import deque
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class FakeNvml(ModuleType):
    """The functions of pynvml that are used, over a few GPUs. ``split`` ones have MIG devices."""

    NVMLError = NvmlError
    NVML_ERROR_TIMEOUT = 10
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_DEVICE_MIG_ENABLE = 1
    nvmlEventTypeXidCriticalError = 8

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.there = ["GPU-a", "GPU-b"]
        self.split: dict[str, list[str]] = {}
        self.lost: set[str] = set()
        self.events: deque[tuple[str, int] | NvmlError] = deque()
        self.registered: list[str] = []
        self.is_up = True

    def nvmlInit(self) -> None:
        if not self.is_up:
            raise NvmlError(9)

    def nvmlDeviceGetCount(self) -> int:
        return len(self.there)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if self.there[index] in self.lost:
            raise NvmlError(15)
        return self.there[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid not in self.there:
            raise NvmlError(6)
        return uuid

    def nvmlDeviceGetMigMode(self, handle: str) -> tuple[int, int]:
        if not self.split:
            raise NvmlError(self.NVML_ERROR_NOT_SUPPORTED)
        return (int(handle in self.split), 0)

    def nvmlDeviceGetMaxMigDeviceCount(self, handle: str) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: str, at: int) -> str:
        if at >= len(self.split[handle]):
            raise NvmlError(6)
        return self.split[handle][at]

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return SimpleNamespace(total=80, free=30)

    def nvmlDeviceGetUUID(self, handle: str) -> bytes:
        return handle.encode()

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlDeviceRegisterEvents(self, handle: str, kinds: int, events: object) -> None:
        assert kinds == self.nvmlEventTypeXidCriticalError
        self.registered.append(handle)

    def nvmlEventSetWait_v2(self, events: object, timeout_ms: int) -> Any:
        if not self.events:
            raise NvmlError(self.NVML_ERROR_TIMEOUT)
        found = self.events.popleft()
        if isinstance(found, NvmlError):
            raise found
        uuid, xid = found
        return SimpleNamespace(device=uuid, eventData=xid)


def fake_nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    """Code that imports ``pynvml`` gets it."""
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake
