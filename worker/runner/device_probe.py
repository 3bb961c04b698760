"""Tests whether a device still computes.

Some errors end one step: too little memory, a bad row. Others end the CUDA context: after an
illegal access, a failed assertion in a kernel or an uncorrectable memory error, every call fails
until the process ends. The error itself does not tell which kind it is, so the probe tests the
device.
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from worker.errors import DeviceLost
from worker.runner.memory import is_out_of_memory

if TYPE_CHECKING:
    import torch

PROBE_S: Final = 1.0
"""Seconds after which a device that has not finished its work also counts as lost."""


class DeviceProbe:
    """Tests a device. Any thread may call ``check``, which waits at most ``timeout_s``."""

    def __init__(self, ask: Callable[[], None], timeout_s: float = PROBE_S) -> None:
        """``ask`` waits for the device, runs a computation on it and raises that call's errors."""
        self._ask = ask
        self._timeout_s = timeout_s

    def check(self) -> None:
        """Return once the device has finished all queued work. Raises ``DeviceLost``."""
        problems: list[str] = []
        # Not on the caller's thread: a call into a hung driver never returns.
        thread = threading.Thread(
            target=self._try, args=(problems,), name="tidegate-probe", daemon=True
        )
        thread.start()
        thread.join(self._timeout_s)
        if thread.is_alive():
            raise DeviceLost(f"the device has not answered for {self._timeout_s:g} s")
        if problems:
            raise DeviceLost(f"the device computes nothing any more ({problems[0]})")

    def _try(self, problems: list[str]) -> None:
        try:
            self._ask()
        except Exception as error:
            if not is_out_of_memory(error):  # a device without free memory still works
                what = f"{error}".partition("\n")[0]
                problems.append(f"{type(error).__name__}: {what}")


def probe_of(device: "torch.device", timeout_s: float = PROBE_S) -> DeviceProbe | None:
    """The probe of a GPU; None for the CPU, which cannot fail without the process."""
    if device.type != "cuda":
        return None
    import torch

    def ask() -> None:
        torch.cuda.synchronize(device)
        torch.ones(8, device=device).sum().item()

    return DeviceProbe(ask, timeout_s)
