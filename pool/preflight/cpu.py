"""Reads this machine's CPU from Linux. Standard library only."""

import os
import re
from dataclasses import dataclass
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


@dataclass(frozen=True, slots=True)
class Cpu:
    """The CPU. ``cores`` is the number that this process may use, within a container's quota."""

    cores: float
    features: tuple[str, ...]


def look() -> Cpu:
    try:
        flags = re.search(r"^flags\s*:(.*)$", CPUINFO.read_text(), re.M)
    except OSError:
        flags = None
    there = set(flags[1].split()) if flags else set()
    return Cpu(_cores(), tuple(name for flag, name in _FEATURES.items() if flag in there))


def _cores() -> float:
    cores = float(len(os.sched_getaffinity(0)))
    try:
        quota, period = (CGROUP / "cpu.max").read_text().split()
        return cores if quota == "max" else min(cores, int(quota) / int(period))
    except (OSError, ValueError):
        return cores
