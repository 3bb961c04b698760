"""NVIDIA's library, played by a module of the same surface: what is asked, and what is made of it.

No real one was ever asked: this machine has no GPU.
"""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pool.preflight.nvml import GpuDevice, GpuFault, GpuUnavailable, Nvml


class NvmlError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class FakeLibrary(ModuleType):
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
        self.events: list[tuple[str, int]] = []
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

    def nvmlDeviceGetName(self, handle: str) -> str:
        return "Fake"

    def nvmlEventSetCreate(self) -> object:
        return object()

    def nvmlDeviceRegisterEvents(self, handle: str, kinds: int, events: object) -> None:
        self.registered.append(handle)

    def nvmlEventSetWait_v2(self, events: object, timeout_ms: int) -> Any:
        if not self.events:
            raise NvmlError(self.NVML_ERROR_TIMEOUT)
        uuid, xid = self.events.pop(0)
        return SimpleNamespace(device=uuid, eventData=xid)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeLibrary:
    fake = FakeLibrary()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


def test_every_gpu_with_its_memory_and_none_that_is_lost(library: FakeLibrary) -> None:
    nvml = Nvml()
    assert nvml.devices() == [
        GpuDevice("0", "GPU-a", "Fake", 80, 30),
        GpuDevice("1", "GPU-b", "Fake", 80, 30),
    ]
    library.lost.add("GPU-a")
    assert [device.uuid for device in nvml.devices()] == ["GPU-b"]


def test_a_split_gpu_is_its_parts(library: FakeLibrary) -> None:
    library.split = {"GPU-b": ["MIG-1", "MIG-2"]}
    assert [(d.index, d.uuid, d.gpu) for d in Nvml().devices()] == [
        ("0", "GPU-a", ""),
        ("1:0", "MIG-1", "GPU-b"),
        ("1:1", "MIG-2", "GPU-b"),
    ]


def test_faults_are_told_once_and_each_gpu_is_registered_once(library: FakeLibrary) -> None:
    nvml = Nvml()
    assert nvml.faults() == [], "nobody has asked for a GPU"
    nvml.devices()
    library.events = [("GPU-a", 79), ("GPU-b", 13)]
    assert nvml.faults() == [GpuFault("GPU-a", 79), GpuFault("GPU-b", 13)]
    assert nvml.faults() == []
    assert library.registered == ["GPU-a", "GPU-b"]


def test_a_driver_that_does_not_answer_is_said(library: FakeLibrary) -> None:
    library.is_up = False
    with pytest.raises(GpuUnavailable, match="does not answer"):
        Nvml().devices()


def test_without_the_package_the_way_to_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(GpuUnavailable, match="pip install 'nvidia-ml-py>=12'"):
        Nvml().devices()
