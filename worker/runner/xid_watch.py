"""Reads GPU failures (Xid) from NVIDIA's driver: memory errors, or a GPU that fell off the bus.

An idle worker thus learns of a failure before the next job. Needs the package ``nvidia-ml-py``,
which vLLM and ``tidegate[gpu]`` install; without it, the first failed step shows the failure.
"""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from worker.errors import DeviceLost
from worker.log import engine_log
from worker.runner.device_probe import DeviceProbe, probe_of
from worker.runner.simulated_device import SimulatedDevice
from worker.runner.synthetic import synthetic_args
from worker.settings import WorkerSettings

if TYPE_CHECKING:
    import torch

_WAIT_MS: Final = 1000

NextXid = Callable[[], int | None]
"""Waits for the Xid of the next event; None after a while without events. Raises the driver's error
once the driver stops reporting."""


class XidWatch:
    """Probes the device after each event, because most Xids are a program's fault."""

    def __init__(self, next_xid: NextXid, probe: DeviceProbe) -> None:
        self._next_xid = next_xid
        self._probe = probe
        self.fault = ""
        """Why the device can no longer compute; empty while it works."""
        # Runs on its own thread: a driver may be slow after it loses its GPU.
        self._thread = threading.Thread(target=self._run, name="tidegate-xid", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self.fault:
            try:
                xid = self._next_xid()
                if xid is not None:
                    self._probe.check()
                    engine_log.warning("the driver reports Xid %d; the GPU computes as before", xid)
            except DeviceLost as error:
                self.fault = f"the driver reports Xid {xid}, and {error}"
            except Exception as error:  # any driver error
                engine_log.info("the driver reports no GPU errors: %s", error)
                return


def gpu_fault_of(settings: WorkerSettings) -> Callable[[], str]:
    """A function that returns why a loaded engine's GPU is lost; "" while it works."""
    is_paced = settings.engine == "synthetic-paced"
    if is_paced and (slow_file := synthetic_args(settings).slow_file) is not None:
        device = SimulatedDevice(slow_file)
        simulated = XidWatch(device.next_xid, DeviceProbe(device.answer))
        return lambda: simulated.fault
    if settings.computes_on_gpu:
        import torch

        # If CUDA is not initialized, the engine does not use torch.
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            watch = watch_gpu(torch.device("cuda", torch.cuda.current_device()))
            if watch is not None:
                return lambda: watch.fault
    return str


def watch_gpu(device: "torch.device") -> XidWatch | None:
    """Watch a GPU; None for the CPU, without ``nvidia-ml-py``, or without reports."""
    probe = probe_of(device)
    if probe is None:
        return None
    try:
        return XidWatch(_events_of(device), probe)
    except Exception as error:  # no package, no permission, or a MIG slice of a GPU
        engine_log.info("the driver's reports of GPU errors are not available: %s", error)
        return None


def _events_of(device: "torch.device") -> NextXid:
    import pynvml
    import torch

    pynvml.nvmlInit()
    uuid = torch.cuda.get_device_properties(device).uuid
    handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
    events = pynvml.nvmlEventSetCreate()
    pynvml.nvmlDeviceRegisterEvents(handle, pynvml.nvmlEventTypeXidCriticalError, events)

    def next_xid() -> int | None:
        try:
            return int(pynvml.nvmlEventSetWait_v2(events, _WAIT_MS).eventData)
        except pynvml.NVMLError as error:
            if error.value == pynvml.NVML_ERROR_TIMEOUT:
                return None
            raise

    return next_xid
