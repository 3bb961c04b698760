import os

import pytest
import torch

from tests.support.processes import python
from worker.errors import DeviceUnavailable
from worker.runner.device import open_device


@pytest.mark.slow
def test_threads_that_wait_for_each_other_sleep() -> None:
    """WK-14: those that spin take the cores from the ones that have to get there."""
    env = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"}
    told = python("-c", "import worker.encoding, torch", env=env | {"OMP_DISPLAY_ENV": "TRUE"})
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in told.stderr


def test_cuda_without_support_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """WK-2: refused with a diagnosis and a hint, never replaced by the CPU."""
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(DeviceUnavailable, match=r"no CUDA support.*--device cpu, or .*_DEVICE=cpu"):
        open_device("cuda")


def test_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceUnavailable, match=r"no usable GPU.*nvidia-smi.*DEVICE=cpu"):
        open_device("cuda")


def test_cuda_that_cannot_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no kernel image is available\nmore")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "ones", fail)
    with pytest.raises(DeviceUnavailable, match=r"\(no kernel image is available\);"):
        open_device("cuda")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda() -> None:
    assert open_device("cuda").type == "cuda"
