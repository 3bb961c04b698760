"""Lists devices through the library of NVIDIA's driver, and reads torch's CUDA version. It needs
neither torch nor a context on a device. Standard library only."""

import ctypes
import importlib.util
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_DRIVER = "libcuda.so.1"
_NAME_BYTES = 128


@dataclass(frozen=True, slots=True)
class UsableGpus:
    """Usable GPUs. ``cuda`` is the newest version that the driver supports, such as ``12.4``. If
    devices are unusable, ``problem`` says why, and ``advice`` how to fix it."""

    devices: tuple[str, ...] = ()
    cuda: str = ""
    problem: str = ""
    advice: str = ""


@cache
def look() -> UsableGpus:
    """Every device that this process may use."""
    try:
        driver = ctypes.CDLL(_DRIVER)
    except OSError:
        return _without_driver()
    status = driver.cuInit(0)
    if status != 0:
        return UsableGpus(
            problem=f"NVIDIA's driver does not start (cuInit says {status})",
            advice=(
                "nvidia-smi says more; after a driver update, restart the machine; in a container,"
                " the toolkit must match"
            ),
        )
    version, number = ctypes.c_int(), ctypes.c_int()
    driver.cuDriverGetVersion(ctypes.byref(version))
    driver.cuDeviceGetCount(ctypes.byref(number))
    names = []
    for index in range(number.value):
        device, name = ctypes.c_int(), ctypes.create_string_buffer(_NAME_BYTES)
        driver.cuDeviceGet(ctypes.byref(device), index)
        driver.cuDeviceGetName(name, _NAME_BYTES, device)
        names.append(name.value.decode("utf-8", "replace"))
    cuda = f"{version.value // 1000}.{version.value % 1000 // 10}"
    if not names:
        return UsableGpus(
            cuda=cuda,
            problem="the driver is there, but no device",
            advice="CUDA_VISIBLE_DEVICES may hide them; tidegate up --device cpu needs none",
        )
    return UsableGpus(tuple(names), cuda)


def torch_cuda() -> str | None:
    """The CUDA version that torch was built for; None for a build without CUDA."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    found = re.search(r"^cuda\b.*=\s*['\"]([\d.]+)['\"]", text, re.M)
    return found[1] if found else None


def _without_driver() -> UsableGpus:
    if Path("/proc/driver/nvidia").exists() or list(Path("/dev").glob("nvidia[0-9]*")):
        return UsableGpus(
            problem=f"there is a GPU, but no {_DRIVER}",
            advice="in a container: docker run --gpus all, with NVIDIA's container toolkit; else "
            "sudo apt-get install the driver's libnvidia-compute package",
        )
    return UsableGpus(
        problem="no NVIDIA driver",
        advice="tidegate up --device cpu needs none; else install the driver",
    )
