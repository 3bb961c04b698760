"""A device that dies in any way is told from one that only failed a step."""

import threading
from collections.abc import Callable

import pytest
import torch

from tests.support.cases import for_each
from worker.errors import DeviceLost
from worker.runner.device_probe import DeviceProbe, probe_of


class OutOfMemoryError(RuntimeError):
    """As torch calls it."""


def raising(error: Exception) -> Callable[[], None]:
    def ask() -> None:
        raise error

    return ask


@for_each(
    "ask",
    [lambda: None, raising(OutOfMemoryError("tried to allocate 2 MiB")), raising(MemoryError())],
)
def test_a_device_that_computes_or_is_only_full_is_alive(ask: Callable[[], None]) -> None:
    DeviceProbe(ask, timeout_s=60.0).check()


def test_a_device_that_raises_is_lost_and_its_own_words_are_told() -> None:
    words = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be …"
    with pytest.raises(DeviceLost, match=r"any more \(RuntimeError: CUDA error: an illegal memory"):
        DeviceProbe(raising(RuntimeError(words)), timeout_s=60.0).check()


def test_a_device_that_does_not_answer_is_lost_and_holds_nobody_up() -> None:
    gate = threading.Event()

    def hang() -> None:
        gate.wait(60.0)

    probe = DeviceProbe(hang, timeout_s=0.02)
    try:
        with pytest.raises(DeviceLost, match=r"has not answered for 0\.02 s"):
            probe.check()
    finally:
        gate.set()


def test_the_cpu_cannot_be_lost_alone() -> None:
    assert probe_of(torch.device("cpu")) is None
