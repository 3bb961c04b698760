"""What is asked of NVIDIA's library, and what is made of it."""

import sys

import pytest

from pool.preflight.nvml import GpuDevice, GpuUnavailable, read_gpus
from tests.support.fake_nvml import FakeNvml, fake_nvml


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    return fake_nvml(monkeypatch)


def test_every_gpu_with_its_memory_and_none_that_is_lost(library: FakeNvml) -> None:
    assert read_gpus() == [
        GpuDevice("0", "GPU-a", 80, 30),
        GpuDevice("1", "GPU-b", 80, 30),
    ]
    library.lost.add("GPU-a")
    assert [device.uuid for device in read_gpus()] == ["GPU-b"]


def test_a_split_gpu_is_its_parts(library: FakeNvml) -> None:
    library.split = {"GPU-b": ["MIG-1", "MIG-2"]}
    assert [(d.index, d.uuid) for d in read_gpus()] == [
        ("0", "GPU-a"),
        ("1:0", "MIG-1"),
        ("1:1", "MIG-2"),
    ]


def test_a_driver_that_does_not_answer_is_said(library: FakeNvml) -> None:
    library.is_up = False
    with pytest.raises(GpuUnavailable, match="does not answer"):
        read_gpus()


def test_without_the_package_the_way_to_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(GpuUnavailable, match="pip install 'nvidia-ml-py>=12'"):
        read_gpus()
