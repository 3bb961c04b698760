"""What the driver says of a GPU."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.support.fake_nvml import FakeNvml, NvmlError, fake_nvml
from worker.runner import xid_watch
from worker.runner.device_probe import DeviceProbe
from worker.runner.xid_watch import XidWatch, gpu_fault_of, watch_gpu
from worker.settings import WorkerSettings

DOUBLE_BIT_ERROR = 48
OF_A_PROGRAM = 31


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    return fake_nvml(monkeypatch)


def watched(
    monkeypatch: pytest.MonkeyPatch, ask: Callable[[], None], uuid: str = "a"
) -> XidWatch | None:
    monkeypatch.setattr(xid_watch, "probe_of", lambda device: DeviceProbe(ask, timeout_s=60.0))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=uuid)
    )
    return watch_gpu(torch.device("cuda", 0))


def lost() -> None:
    raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


def test_an_ecc_error_is_noticed_without_a_job(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    watch = watched(monkeypatch, lost)
    assert watch is not None and nvml.registered == ["GPU-a"]
    nvml.events.append(("GPU-a", DOUBLE_BIT_ERROR))
    watch._thread.join(60)
    assert "Xid 48" in watch.fault and "uncorrectable ECC error" in watch.fault


def test_another_programs_fault_is_only_told(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch = watched(monkeypatch, lambda: None)
    assert watch is not None
    nvml.events.extend([("GPU-a", OF_A_PROGRAM), NvmlError(999)])  # the driver tells no more
    watch._thread.join(60)
    assert not watch.fault and "Xid 31; the GPU computes as before" in caplog.text


def test_a_simulated_gpu_is_watched_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "fault"
    file.write_text(f"xid {os.getpid()}")
    settings = WorkerSettings(
        model_path=Path("unused"), engine="synthetic-paced", engine_args={"slow_file": str(file)}
    )
    fault, ends_at = gpu_fault_of(settings), time.monotonic() + 60
    while not fault() and time.monotonic() < ends_at:
        time.sleep(0.01)
    assert "Xid 79" in fault()


def test_without_the_package_or_for_a_part_of_a_gpu_nothing_is_watched(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert watch_gpu(torch.device("cpu")) is None
    assert watched(monkeypatch, lost, uuid="of a MIG device") is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert watched(monkeypatch, lost) is None
