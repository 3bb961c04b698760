"""Finds how much memory this process's control groups leave it: a container's limit, say.

The machine's own figures know nothing of them. Version 2 has one hierarchy, version 1 one for
memory; the tightest group on the way to the root counts. Inside a container the path may be that of
the host, where the mount shows the container's own group as its root.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

_MOUNT: Final = Path("/sys/fs/cgroup")
_OWN: Final = Path("/proc/self/cgroup")


class _Files(NamedTuple):
    limit: str
    usage: str
    reclaimable: str
    """Key in ``memory.stat`` for cached files that were not used recently."""


_V1: Final = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2: Final = _Files("memory.max", "memory.current", "inactive_file")


def free_bytes(own: Path = _OWN, mount: Path = _MOUNT) -> int | None:
    """The fewest bytes that a group leaves; None without any limit."""
    left = [
        found
        for folder, files in _groups(own, mount)
        if (found := _left(folder, files)) is not None
    ]
    return max(0, min(left)) if left else None


def _groups(own: Path, mount: Path) -> Iterator[tuple[Path, _Files]]:
    try:
        lines = own.read_text("utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, files = mount, _V2
        elif "memory" in controllers.split(","):
            root, files = mount / "memory", _V1
        else:
            continue
        relative = Path(path.lstrip("/"))
        for folder in (relative, *relative.parents):
            yield root / folder, files


def _left(folder: Path, files: _Files) -> int | None:
    try:
        limit = int((folder / files.limit).read_text("ascii"))  # "max" is none
        used = int((folder / files.usage).read_text("ascii"))
        stat = (folder / "memory.stat").read_text("ascii").split()
    except (OSError, ValueError):
        return None
    figures = dict(zip(stat[::2], stat[1::2], strict=False))
    return limit - used + int(figures.get(files.reclaimable, 0))
