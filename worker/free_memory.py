"""Reads the free memory from Linux, for workers and their launchers. Standard library only."""

import re
from pathlib import Path
from typing import Final

_MEMINFO: Final = Path("/proc/meminfo")
_MOUNT: Final = Path("/sys/fs/cgroup")
_OWN: Final = Path("/proc/self/cgroup")


def memory_free() -> int | None:
    """Bytes of the machine's memory that programs can still use, or the bytes left under a
    container's limit if fewer; None if unknown."""
    free = free_of_groups()
    try:
        found = re.search(r"^MemAvailable:\s*(\d+) kB", _MEMINFO.read_text("ascii"), re.M)
    except (OSError, ValueError):  # not Linux
        return free
    if found is None:
        return free
    available = int(found[1]) * 1024
    return available if free is None else min(free, available)


def free_of_groups(own: Path = _OWN, mount: Path = _MOUNT) -> int | None:
    """Minimum bytes left under the limits of this process's cgroups (v2); None without a limit.

    The tightest group up to the root counts. Inside a container, the path may be the host's path,
    while the mount shows the container's own group as its root.
    """
    try:
        lines = own.read_text("utf-8").splitlines()
    except OSError:
        return None
    own_groups = (Path(line[4:]) for line in lines if line.startswith("0::/"))
    folders = (mount / folder for group in own_groups for folder in (group, *group.parents))
    left = [found for folder in folders if (found := _left_in(folder)) is not None]
    return max(0, min(left)) if left else None


def _left_in(folder: Path) -> int | None:
    try:
        limit = int((folder / "memory.max").read_text("ascii"))  # "max" is none
        used = int((folder / "memory.current").read_text("ascii"))
        stat = (folder / "memory.stat").read_text("ascii").split()
    except (OSError, ValueError):
        return None
    figures = dict(zip(stat[::2], stat[1::2], strict=False))
    return limit - used + int(figures.get("inactive_file", 0))  # cached, not used recently
