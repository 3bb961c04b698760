"""Installs tools that only the system's package manager brings, if that is allowed explicitly.

Otherwise the command is shown, and nothing is done (PV-6).
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from catalog.errors import MachineUnfit

_PACKAGES: Final = {
    "apt-get": {
        "c++": "g++",
        "cmake": "cmake",
        "ccache": "ccache",
        "git": "git",
        "nvcc": "nvidia-cuda-toolkit",
    },
    "dnf": {
        "c++": "gcc-c++",
        "cmake": "cmake",
        "ccache": "ccache",
        "git": "git",
        "nvcc": "cuda-toolkit",
    },
}
"""Names of packages, by package manager and tool."""

Run = Callable[[Sequence[str]], int]


def install_command(
    tools: Iterable[str], which: Callable[[str], str | None] = shutil.which
) -> list[str]:
    """The command that installs ``tools`` here; empty if no package manager is known."""
    for manager, packages in _PACKAGES.items():
        if which(manager) is not None:
            names = [packages[tool] for tool in tools]
            as_root = [] if os.geteuid() == 0 else ["sudo", "-n"]
            return [*as_root, manager, "install", "-y", *names]
    return []


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
    command = install_command(missing, which)
    what = f"this machine lacks {', '.join(missing)}"
    if not command:
        raise MachineUnfit(f"{what}, and has neither apt-get nor dnf: install it by hand")
    shown = shlex.join(command)
    if not allowed:
        raise MachineUnfit(
            f"{what}: {shown} brings it; --allow-system-packages has that done for you"
        )
    if run(command) != 0:
        raise MachineUnfit(f"{what}, and {shown} failed (its own words are above)")
    if still := [tool for tool in missing if which(tool) is None]:
        raise MachineUnfit(f"{shown} went well, and {', '.join(still)} is still not on PATH")
