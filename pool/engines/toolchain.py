"""Tools of a build that the system's package manager brings, if that is allowed (PV-6)."""

import os
import shlex
import shutil
import subprocess
from collections.abc import Callable, Iterable, Sequence
from typing import Final

from catalog.errors import MachineUnfit

_PACKAGES: Final = {
    "apt-get": {"c++": "g++", "nvcc": "nvidia-cuda-toolkit"},
    "dnf": {"c++": "gcc-c++", "nvcc": "cuda-toolkit"},
}
"""Names of packages by package manager and tool, where they are not those of the tools."""


def require_tools(
    tools: Iterable[str],
    *,
    allowed: bool,
    which: Callable[[str], str | None] = shutil.which,
    run: Callable[[Sequence[str]], int] = subprocess.call,
) -> None:
    """Raise ``MachineUnfit`` if ``tools`` lack and installing them is not ``allowed`` or fails."""
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
