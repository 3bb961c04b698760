"""Finds what this machine can run and build with, and installs tools that only the system's package
manager brings, if that is allowed explicitly (PV-6); otherwise the command is shown.
"""

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from typing import Final

import msgspec

from catalog.errors import MachineUnfit
from pool.preflight import gpu

_VERSION: Final = re.compile(r"(\d+\.\d+(?:\.\d+)?)")
_PROBE_S: Final = 10.0
_TOOLS: Final = ("nvcc", "cc", "c++", "cmake", "ninja", "ccache", "git")
_PACKAGES: Final = {
    "apt-get": {"c++": "g++", "nvcc": "nvidia-cuda-toolkit"},
    "dnf": {"c++": "gcc-c++", "nvcc": "cuda-toolkit"},
}
"""Names of packages by package manager and tool, where they are not those of the tools."""

Run = Callable[[Sequence[str]], int]


class Tool(msgspec.Struct, frozen=True):
    path: str
    version: str = ""
    """The tool's version; empty if it does not tell."""


class Toolchain(msgspec.Struct, frozen=True):
    """Tools of this machine. ``cuda`` is the newest version that the driver can do, or empty."""

    gpus: tuple[str, ...]
    cuda: str
    tools: dict[str, Tool]
    """Tools that are there, by name."""

    @property
    def ccache(self) -> str:
        """Path of ccache; empty if there is none."""
        return self.tools["ccache"].path if "ccache" in self.tools else ""


def look() -> Toolchain:
    """The toolchain as it is now. Takes a second: each tool is asked for its version."""
    devices = gpu.look()
    found = {name: path for name in _TOOLS if (path := shutil.which(name)) is not None}
    tools = {name: Tool(path, _version(path)) for name, path in found.items()}
    return Toolchain(devices.devices, devices.cuda, tools)


def _version(path: str) -> str:
    command = [path, "--version"]
    try:
        told = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_PROBE_S
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"release (\S+?),", told) or _VERSION.search(told)
    return found[1] if found else ""


def require_tools(
    tools: Iterable[str],
    *,
    allowed: bool,
    which: Callable[[str], str | None] = shutil.which,
    run: Run = lambda command: subprocess.run(command, check=False).returncode,
) -> None:
    """Check that ``tools`` are there, and install missing ones. Raises ``MachineUnfit`` if
    installing them is not ``allowed`` or fails."""
    missing = [tool for tool in tools if which(tool) is None]
    if not missing:
        return
    what = f"this machine lacks {', '.join(missing)}"
    manager = next((name for name in _PACKAGES if which(name) is not None), None)
    if manager is None:
        raise MachineUnfit(f"{what}, and has neither apt-get nor dnf: install it by hand")
    as_root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    packages = [_PACKAGES[manager].get(tool, tool) for tool in missing]
    command = [*as_root, manager, "install", "-y", *packages]
    shown = shlex.join(command)
    if not allowed:
        raise MachineUnfit(
            f"{what}: {shown} brings it; --allow-system-packages has that done for you"
        )
    if run(command) != 0:
        raise MachineUnfit(f"{what}, and {shown} failed (its own words are above)")
    if still := [tool for tool in missing if which(tool) is None]:
        raise MachineUnfit(f"{shown} went well, and {', '.join(still)} is still not on PATH")
