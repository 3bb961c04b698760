"""Checks this machine's requirements; each error has one sentence with the command that fixes it.
Reads its CPU. Standard library only, because set-up runs this before it installs anything.
"""

import os
import platform
import re
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

from catalog.errors import MachineUnfit
from worker.extras import pip_install

MIN_GLIBC = (2, 35)
CPUINFO = Path("/proc/cpuinfo")
CGROUP = Path("/sys/fs/cgroup")

_FEATURES = {
    "avx2": "AVX2",
    "avx512f": "AVX-512",
    "avx512_bf16": "AVX-512 bf16",
    "amx_tile": "AMX",
    "amx_bf16": "AMX bf16",
}
"""CPU features for fast matrix products, by their names in ``flags``."""
_SYSTEM_LIBRARIES = (
    "/usr/lib/x86_64-linux-gnu",
    "/lib/x86_64-linux-gnu",
    "/usr/lib64",
    "/usr/lib",
    "/usr/local/lib",
)


def python_version() -> str:
    """Version of the running Python, such as ``3.11``."""
    return f"{sys.version_info.major}.{sys.version_info.minor}"


def check_venv_module() -> None:
    """Raise ``MachineUnfit`` if this Python cannot create virtual environments."""
    if find_spec("venv") is None or find_spec("ensurepip") is None:
        raise MachineUnfit(
            "This Python cannot create virtual environments (it lacks venv or ensurepip): "
            f"sudo apt-get install python{python_version()}-venv"
        )


def check_platform() -> None:
    """Raise ``MachineUnfit`` if the Triton server of the wheel cannot run here."""
    system, machine = platform.system(), platform.machine()
    if (system, machine) != ("Linux", "x86_64"):
        raise MachineUnfit(
            f"The Triton server of the wheel needs Linux on x86_64, and this is {system} on "
            f"{machine}: use docker/ on such a machine, or give a Triton of your own with "
            "tidegate up --triton PATH."
        )
    if (glibc := _glibc_version()) < MIN_GLIBC:
        raise MachineUnfit(
            f"The Triton server of the wheel needs glibc {_dotted(MIN_GLIBC)} or newer, and this "
            f"machine has {_dotted(glibc)}: use Debian 12, Ubuntu 22.04 or newer, or docker/."
        )


def check_stub_python(stub: Path) -> None:
    """Raise ``MachineUnfit`` if a Python stub was built for another Python than this one."""
    built_for = re.search(rb"libpython(3\.\d+)\.so", stub.read_bytes())
    if built_for and (wanted := built_for[1].decode()) != python_version():
        raise MachineUnfit(
            f"The Python stub of that Triton ({stub}) runs Python {wanted}, and "
            f"this is {python_version()}: {set_up_with(wanted)}"
        )


def set_up_with(python: str) -> str:
    """How to change the Python version: in a checkout, or in an image without a Makefile."""
    if (Path(__file__).parents[2] / "Makefile").exists():
        return f"make clean && make PYTHON=python{python}"
    return (
        f"install Tidegate with python{python}, in an image by a base whose Python that is "
        "(docker/README.md)"
    )


def libpython_name() -> str:
    """Name of the file that Triton's Python stub loads."""
    return f"libpython{python_version()}.so.1.0"


def libpython_places() -> list[str]:
    """Directories where libpython may be, most likely first."""
    configured = sysconfig.get_config_var("LIBDIR")
    return [*filter(None, [configured, f"{sys.base_prefix}/lib"]), *_SYSTEM_LIBRARIES]


def find_libpython() -> Path | None:
    """Directory of the shared libpython; None if this machine has none."""
    places = map(Path, libpython_places())
    return next((place for place in places if (place / libpython_name()).exists()), None)


def libpython_dir(stub: Path) -> Path | None:
    """Directory of the shared libpython that ``stub`` needs; None if it brings its own. Raises
    ``MachineUnfit`` if the machine has none."""
    name = libpython_name()
    if name.encode() not in stub.read_bytes():
        return None
    if found := find_libpython():
        return found
    raise MachineUnfit(
        f"Triton's Python stub needs {name}, and this machine has none: "
        f"sudo apt-get install libpython{python_version()} (a Python built from source needs "
        "--enable-shared)"
    )


def slot_packages_lacking(speech: str = "espeak") -> tuple[str, ...]:
    """Missing distributions for clips with the speech provider ``speech``; other providers than
    eSpeak are checked at model load."""
    wanted = {"av": "av"} | ({"espeakng_loader": "espeakng-loader"} if speech == "espeak" else {})
    return tuple(name for module, name in wanted.items() if find_spec(module) is None)


def check_slot(speech: str = "espeak") -> None:
    """Raise ``MachineUnfit`` if packages of the extra ``slot`` are missing."""
    if missing := slot_packages_lacking(speech):
        raise MachineUnfit(
            f"The slot pipeline needs {' and '.join(missing)}, which this Python does not have: "
            f"{pip_install('slot')} (make demo ARGS=--slot does that in a checkout), or leave out"
            " --slot."
        )


def cpu_features() -> list[str]:
    """The names of the CPU's features for fast matrix products."""
    try:
        flags = re.search(r"^flags\s*:(.*)$", CPUINFO.read_text(), re.M)
    except OSError:
        return []
    there = flags[1].split() if flags else []
    return [name for flag, name in _FEATURES.items() if flag in there]


def cpu_cores() -> float:
    """Number of cores that this process may use, within a container's quota."""
    usable = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
        return usable if quota == "max" else min(usable, int(quota) / int(period))
    except (OSError, ValueError):
        return usable


def _glibc_version() -> tuple[int, int]:
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (ValueError, OSError):  # not glibc: musl, say
        text = ""
    found = re.search(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}" if version != (0, 0) else "none"
