"""The machine and the software versions of a run."""

import os
import platform
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple, Self, cast, get_args

from perf.report.bundle import MachineFacts, Tier

_PACKAGES = (
    "tidegate",
    "aiohttp",
    "grpcio",
    "msgspec",
    "numpy",
    "tokenizers",
    "torch",
    "tritonclient",
    "uvloop",
)


class CpuTimes(NamedTuple):
    """CPU time since the machine started, over all cores, in the kernel's ticks."""

    used: int
    stolen: int
    """Ticks in which something could have run, but the host ran another machine."""

    @classmethod
    def now(cls, stat: Path = Path("/proc/stat")) -> Self | None:
        """Ticks of ``stat``, which proc(5) describes; None where it cannot be read."""
        try:
            first, *_ = stat.read_text().splitlines()
            # cpu, user, nice, system, idle, iowait, irq, softirq, steal; a guest's are user's too
            user, nice, system, _, _, irq, softirq, stolen = map(int, first.split()[1:9])
        except (OSError, ValueError):
            return None
        return cls(user + nice + system + irq + softirq, stolen)

    def stolen_percent(self, until: "CpuTimes") -> float:
        """Share, from then to ``until``, of the CPU time wanted that was stolen, in percent."""
        stolen = until.stolen - self.stolen
        wanted = until.used - self.used + stolen
        return round(100 * stolen / wanted, 1) if wanted > 0 else 0.0


def describe_machine() -> MachineFacts:
    """The machine as it is now."""
    return MachineFacts(
        cpu=_cpu_model(),
        cores=len(os.sched_getaffinity(0)),
        memory_gib=round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        gpus=_gpus(),
        kernel=f"{platform.system()} {platform.release()}",
        load_before=round(os.getloadavg()[0], 2),
        tier=tier(),
    )


def tier() -> Tier:
    """Kind of this machine: as ``PERF_TIER`` says, else by what it has. A virtual machine
    of up to four cores counts as CI's, with or without a CI around it.

    Raises ``ValueError`` for a word that is not a tier.
    """
    told = os.environ.get("PERF_TIER", "")
    if told:
        for one in get_args(Tier):
            if told == one:
                return cast(Tier, one)
        raise ValueError(f"PERF_TIER must be one of {get_args(Tier)}, got {told[:40]!r}")
    if _gpus():
        return "server with GPU"
    if any(Path("/sys/class/power_supply").glob("BAT*")):
        return "laptop"
    is_virtual = " hypervisor" in Path("/proc/cpuinfo").read_text()
    is_small = len(os.sched_getaffinity(0)) <= 4
    return "CI" if is_virtual and is_small else "workstation"


def versions() -> dict[str, str]:
    """Versions of Python and of every package that can move a figure."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _gpus() -> list[str]:
    listed = output_of("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader")
    return listed.splitlines()


def output_of(*command: str) -> str:
    """Output of a command; empty when it is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
