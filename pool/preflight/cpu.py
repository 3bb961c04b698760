"""Reads this machine's CPU from Linux. Standard library only."""

import os
import re
from pathlib import Path

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


def features() -> list[str]:
    """The names of the CPU's features for fast matrix products."""
    try:
        flags = re.search(r"^flags\s*:(.*)$", CPUINFO.read_text(), re.M)
    except OSError:
        return []
    there = flags[1].split() if flags else []
    return [name for flag, name in _FEATURES.items() if flag in there]


def cores() -> float:
    """Number of cores that this process may use, within a container's quota."""
    usable = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
        return usable if quota == "max" else min(usable, int(quota) / int(period))
    except (OSError, ValueError):
        return usable
