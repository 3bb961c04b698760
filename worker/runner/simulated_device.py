"""The device of the paced synthetic engine, which fails like a GPU on request. Tests and
``perf.chaos`` request failures with a file (``slow_file`` of ``SyntheticArgs``)::

    10            each step takes ten times as long, for as long as the file says so
    lost 4711     in process 4711 every launch fails, as after an illegal access; for good
    hangs 4711    … no launch comes back
    full 4711     … no launch finds memory
    xid 4711      … the driver reports an error, and the device answers no more; steps continue
"""

import math
import os
import threading
import time
from enum import StrEnum
from pathlib import Path
from typing import Final, NoReturn

from worker.core import Clock

LOOK_EVERY_S: Final = 0.1
_OFF_THE_BUS: Final = 79
"""NVIDIA's Xid for a GPU that has fallen off the bus."""


class DeviceFault(StrEnum):
    """A way in which a device fails for good."""

    LOST = "lost"
    HANGS = "hangs"
    FULL = "full"
    XID = "xid"


class SimulatedDevice:
    """A device that works unless ``file`` says otherwise."""

    def __init__(self, file: Path | None = None, clock: Clock = time.monotonic) -> None:
        self._file = file
        self._clock = clock
        self._factor = 1.0
        self._fault: DeviceFault | None = None
        self._look_at = -math.inf
        self._released = threading.Event()

    def launch(self) -> float:
        """Begin a step. Returns the factor by which it takes longer than usual."""
        now = self._clock()
        if now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            self._look()
        self._fail_if(DeviceFault.LOST)
        if self._fault is DeviceFault.FULL:
            raise MemoryError("the simulated device has no memory left")
        return self._factor

    def answer(self) -> None:
        """Compute something for a ``DeviceProbe``."""
        self._look()
        self._fail_if(DeviceFault.LOST, DeviceFault.XID)

    def next_xid(self) -> int | None:
        """The next Xid that its driver reports; see ``NextXid``."""
        if self._released.wait(LOOK_EVERY_S):
            _fail()
        self._look()
        return _OFF_THE_BUS if self._fault is DeviceFault.XID else None

    def release(self) -> None:
        """Make hanging or watching threads raise, so that a test can end them."""
        self._released.set()

    def _fail_if(self, *faults: DeviceFault) -> None:
        if self._fault is DeviceFault.HANGS:
            self._released.wait()
            _fail()
        if self._fault in faults:
            _fail()

    def _look(self) -> None:
        """Read the file, unless its last state is permanent."""
        if self._file is None or self._fault is not None:
            return
        self._factor = 1.0
        try:
            words = self._file.read_text().split()
            if len(words) == 1:
                self._factor = float(words[0])
            elif words[1:] == [str(os.getpid())]:
                self._fault = DeviceFault(words[0])
        except (OSError, ValueError):  # no file, or a partly written one
            return


def _fail() -> NoReturn:
    raise RuntimeError("CUDA error: an illegal memory access was encountered (simulated)")
