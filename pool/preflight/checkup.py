"""Checks everything that this machine may lack in one go: ``tidegate doctor``.

``host`` raises at the first lack that keeps set-up from going on; this finds them all, including
those that only cost speed. Standard library only, and nothing here starts anything.
"""

import os
import resource
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from catalog.errors import MachineUnfit, NoEngine, PortInUse, ProvisionError
from pool.engines.triton import find_triton
from pool.engines.triton_wheel import DOWNLOAD_MB
from pool.preflight import cpu, gpu, slot
from pool.preflight.host import (
    check_platform,
    libpython_name,
    libpython_places,
    python_version,
)
from pool.process.ports import host_port, require_free
from worker.extras import pip_install

_MIB = 2**20
_GIB = 2**30
_MIN_SHM = 64 * _MIB
_MIN_DISK = 1 * _GIB
_MIN_FILES = 4096
_MIN_MEMORY = 2 * _GIB


class Verdict(StrEnum):
    """Result of a check. ``WARN``: it works, but slower, or not for everything."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check. ``advice`` says what to do, empty if there is nothing to be done."""

    check: str
    verdict: Verdict
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class WantedService:
    """The service that is to run here. ``device`` None means a GPU if there is one."""

    home: Path
    device: str | None = None
    triton: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8080


def examine(wanted: WantedService) -> Iterator[Finding]:
    """Run the checks one after the other, so that each finding can be shown at once."""
    checks: tuple[Callable[[WantedService], Finding], ...] = (
        _python,
        _libpython,
        _triton,
        _gpu,
        _torch,
        _cpu,
        _numba,
        _slot,
        _memory,
        _shared_memory,
        _disk,
        _files,
        _port,
    )
    for check in checks:
        yield check(wanted)


def _python(wanted: WantedService) -> Finding:
    try:
        check_platform()
    except MachineUnfit as error:
        return Finding("platform", Verdict.FAIL, "cannot run the wheel's Triton", str(error))
    return Finding("platform", Verdict.OK, f"Linux x86_64, Python {python_version()}")


def _libpython(wanted: WantedService) -> Finding:
    name = libpython_name()
    for place in libpython_places():
        if (Path(place) / name).exists():
            return Finding("libpython", Verdict.OK, f"{place}/{name}")
    return Finding(
        "libpython",
        Verdict.FAIL,
        f"no {name}, which Triton's Python stub needs",
        f"sudo apt-get install libpython{python_version()} (a Python built from source needs "
        f"--enable-shared); looked in {', '.join(libpython_places())}",
    )


def _triton(wanted: WantedService) -> Finding:
    try:
        install = find_triton(wanted.triton, wanted.home)
    except NoEngine:
        return Finding(
            "triton",
            Verdict.WARN,
            "no server on this machine",
            f"tidegate up fetches one ({DOWNLOAD_MB} MB), or give one with --triton PATH",
        )
    except ProvisionError as error:
        return Finding("triton", Verdict.FAIL, "the server cannot run here", str(error))
    return Finding("triton", Verdict.OK, install.description)


def _gpu(wanted: WantedService) -> Finding:
    seen = gpu.look()
    lacking = Verdict.FAIL if wanted.device == "cuda" else Verdict.WARN
    if wanted.device == "cpu":
        return Finding("gpu", Verdict.OK, "not wanted (--device cpu)")
    if seen.problem:
        return Finding("gpu", lacking, seen.problem, seen.advice)
    names = ", ".join(seen.devices)
    return Finding("gpu", Verdict.OK, f"{names}; driver for CUDA {seen.cuda}")


def _torch(wanted: WantedService) -> Finding:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return Finding(
            "torch",
            Verdict.FAIL,
            "not installed",
            "make setup in a checkout, or install the wheel anew",
        )
    built_for, seen = gpu.torch_cuda(), gpu.look()
    if wanted.device == "cpu" or seen.problem:
        return Finding("torch", Verdict.OK, version)
    if built_for is None:
        return Finding(
            "torch",
            Verdict.FAIL if wanted.device == "cuda" else Verdict.WARN,
            f"{version} was built without CUDA, and there is a GPU",
            "pip install --force-reinstall torch (without an index for CPU builds)",
        )
    if seen.cuda and _numbers(built_for)[0] > _numbers(seen.cuda)[0]:
        return Finding(
            "torch",
            Verdict.FAIL,
            f"{version} needs CUDA {built_for}, and the driver can do {seen.cuda}",
            "update NVIDIA's driver, or install a torch built for an older CUDA",
        )
    return Finding("torch", Verdict.OK, f"{version} for CUDA {built_for}")


def _cpu(wanted: WantedService) -> Finding:
    seen = cpu.look()
    names = ", ".join(seen.features) or "none of AVX2, AVX-512, AMX"
    found = f"{seen.cores:g} cores; {names}"
    if not seen.features:
        return Finding(
            "cpu",
            Verdict.WARN,
            found,
            "generation on this CPU is slow; in a virtual machine, pass the host's CPU on "
            "(-cpu host)",
        )
    return Finding("cpu", Verdict.OK, found)


def _numba(wanted: WantedService) -> Finding:
    try:
        return Finding("numba", Verdict.OK, metadata.version("numba"))
    except metadata.PackageNotFoundError:
        return Finding(
            "numba",
            Verdict.OK if wanted.device == "cuda" else Verdict.WARN,
            "not installed: on the CPU, steps are not compiled",
            pip_install("cpu"),
        )


def _slot(wanted: WantedService) -> Finding:
    missing = slot.lacking(os.environ.get("TIDEGATE_SLOT__SPEECH", "espeak"))
    if not missing:
        return Finding("slot", Verdict.OK, "clips can be rendered (tidegate up --slot)")
    found = f"{' and '.join(missing)} not installed: tidegate up --slot cannot render clips"
    return Finding("slot", Verdict.WARN, found, pip_install("slot"))


def _memory(wanted: WantedService) -> Finding:
    free = cpu.memory_free()
    if free is None:
        return Finding("memory", Verdict.OK, "unknown")
    found = f"{_size(free)} free"
    if free < _MIN_MEMORY:
        return Finding(
            "memory",
            Verdict.WARN,
            found,
            "the demo model needs 2 GiB; raise the container's limit, or end something",
        )
    return Finding("memory", Verdict.OK, found)


def _shared_memory(wanted: WantedService) -> Finding:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        return Finding(
            "/dev/shm",
            Verdict.FAIL,
            f"cannot be used: {error.strerror}",
            "mount -t tmpfs tmpfs /dev/shm, or docker run --ipc=host",
        )
    if free < _MIN_SHM:
        return Finding(
            "/dev/shm",
            Verdict.FAIL,
            f"{_size(free)} free, of which Triton and its models need {_size(_MIN_SHM)}",
            "docker run --shm-size=1g, or remove what ended programs left in /dev/shm",
        )
    return Finding("/dev/shm", Verdict.OK, f"{_size(free)} free")


def _disk(wanted: WantedService) -> Finding:
    folder = next(p for p in (wanted.home, *wanted.home.parents) if p.exists())
    if not os.access(folder, os.W_OK):
        return Finding(
            "disk",
            Verdict.FAIL,
            f"{folder} cannot be written",
            "set TIDEGATE_HOME to a folder that can",
        )
    free = shutil.disk_usage(folder).free
    found = f"{_size(free)} free in {folder}"
    if free < _MIN_DISK:
        advice = "make room, or set TIDEGATE_HOME to a folder on another disk"
        return Finding("disk", Verdict.WARN, found, advice)
    return Finding("disk", Verdict.OK, found)


def _files(wanted: WantedService) -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return Finding("open files", Verdict.OK, "no limit")
    if soft < _MIN_FILES:
        can = f"ulimit -n {hard}" if hard > soft else "raise LimitNOFILE or /etc/security/limits"
        return Finding(
            "open files",
            Verdict.WARN,
            f"{soft} at most: each client takes one",
            f"{can}, before tidegate up",
        )
    return Finding("open files", Verdict.OK, f"{soft} at most")


def _port(wanted: WantedService) -> Finding:
    where = host_port(wanted.host, wanted.port)
    remedy = "take a free one with tidegate up --port 0, or another with --port"
    try:
        require_free(wanted.host, wanted.port, remedy)
    except PortInUse as error:
        return Finding("port", Verdict.WARN, f"{where} cannot be listened on", str(error))
    return Finding("port", Verdict.OK, f"{where} is free")


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit()) or (0,)


def _size(size: float) -> str:
    return f"{size / _GIB:.1f} GiB" if size >= _GIB else f"{size / _MIB:.0f} MiB"
