"""Checks all requirements of this machine at once, for ``tidegate doctor``.

``host`` raises at the first missing requirement that prevents set-up. This module finds all of
them, including those that only cost speed. Standard library only; it starts no processes.
"""

import os
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from importlib import metadata
from pathlib import Path

from catalog.errors import MachineUnfit, NoEngine, PortInUse, ProvisionError
from pool.engines.triton import find_triton
from pool.engines.triton_wheel import DOWNLOAD_MB
from pool.preflight import gpu
from pool.preflight.host import (
    check_platform,
    cpu_cores,
    cpu_features,
    find_libpython,
    libpython_name,
    libpython_places,
    python_version,
    slot_packages_lacking,
)
from pool.process.ports import host_port, require_free
from worker.extras import pip_install
from worker.free_memory import memory_free

_MIB = 2**20
_GIB = 2**30
_MIN_SHM = 64 * _MIB
_MIN_DISK = 1 * _GIB
_MIN_FILES = 4096
_MIN_MEMORY = 2 * _GIB


class CheckupVerdict(StrEnum):
    """Result of a check. ``WARN``: it works, but slower or without some features."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


OK, WARN, FAIL = CheckupVerdict


@dataclass(frozen=True, slots=True)
class CheckupFinding:
    """The result of one check. ``advice`` says how to fix it, if needed."""

    check: str
    verdict: CheckupVerdict
    found: str
    advice: str = ""


_Result = tuple[CheckupVerdict, str] | tuple[CheckupVerdict, str, str]
"""Verdict, finding and advice."""


def examine(
    home: Path,
    device: str | None = None,
    triton: Path | None = None,
    host: str = "127.0.0.1",
    port: int = 8080,
) -> Iterator[CheckupFinding]:
    """What this machine has for a service. ``device`` None means a GPU if there is one. Yields the
    findings one by one, so that each can be shown immediately."""
    yield CheckupFinding("platform", *_platform())
    yield CheckupFinding("libpython", *_libpython())
    yield CheckupFinding("triton", *_triton(triton, home))
    yield CheckupFinding("gpu", *_gpu(device))
    yield CheckupFinding("torch", *_torch(device))
    yield CheckupFinding("cpu", *_cpu())
    yield CheckupFinding("numba", *_numba(device))
    yield CheckupFinding("slot", *_slot())
    yield CheckupFinding("memory", *_memory())
    yield CheckupFinding("/dev/shm", *_shared_memory())
    yield CheckupFinding("disk", *_disk(home))
    yield CheckupFinding("open files", *_files())
    yield CheckupFinding("port", *_port(host, port))


def _platform() -> _Result:
    try:
        check_platform()
    except MachineUnfit as error:
        return FAIL, "cannot run the wheel's Triton", str(error)
    return OK, f"Linux x86_64, Python {python_version()}"


def _libpython() -> _Result:
    name = libpython_name()
    if found := find_libpython():
        return OK, f"{found}/{name}"
    advice = (
        f"sudo apt-get install libpython{python_version()} (a Python built from source needs "
        f"--enable-shared); looked in {', '.join(libpython_places())}"
    )
    return FAIL, f"no {name}, which Triton's Python stub needs", advice


def _triton(configured: Path | None, home: Path) -> _Result:
    try:
        return OK, find_triton(configured, home).description
    except NoEngine:
        advice = f"tidegate up fetches one ({DOWNLOAD_MB} MB), or give one with --triton PATH"
        return WARN, "no server on this machine", advice
    except ProvisionError as error:
        return FAIL, "the server cannot run here", str(error)


def _gpu(device: str | None) -> _Result:
    seen = gpu.look()
    if device == "cpu":
        return OK, "not wanted (--device cpu)"
    if seen.problem:
        return FAIL if device == "cuda" else WARN, seen.problem, seen.advice
    return OK, f"{', '.join(seen.devices)}; driver for CUDA {seen.cuda}"


def _torch(device: str | None) -> _Result:
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return FAIL, "not installed", "make setup in a checkout, or install the wheel again"
    built_for, seen = gpu.torch_cuda(), gpu.look()
    if device == "cpu" or seen.problem:
        return OK, version
    if built_for is None:
        return (
            FAIL if device == "cuda" else WARN,
            f"{version} was built without CUDA, and there is a GPU",
            "pip install --force-reinstall torch (without an index for CPU builds)",
        )
    if seen.cuda and _numbers(built_for)[0] > _numbers(seen.cuda)[0]:
        return (
            FAIL,
            f"{version} needs CUDA {built_for}, and the driver can do {seen.cuda}",
            "update NVIDIA's driver, or install a torch built for an older CUDA",
        )
    return OK, f"{version} for CUDA {built_for}"


def _cpu() -> _Result:
    cores, features = cpu_cores(), cpu_features()
    if features:
        return OK, f"{cores:g} cores; {', '.join(features)}"
    advice = "generation is slow; in a virtual machine, pass the host's CPU on (-cpu host)"
    return WARN, f"{cores:g} cores; none of AVX2, AVX-512, AMX", advice


def _numba(device: str | None) -> _Result:
    try:
        return OK, metadata.version("numba")
    except metadata.PackageNotFoundError:
        verdict = OK if device == "cuda" else WARN
        return verdict, "not installed: on the CPU, steps are not compiled", pip_install("cpu")


def _slot() -> _Result:
    missing = slot_packages_lacking(os.environ.get("TIDEGATE_SLOT__SPEECH", "espeak"))
    if not missing:
        return OK, "clips can be rendered (tidegate up --slot)"
    found = f"{' and '.join(missing)} not installed: tidegate up --slot cannot render clips"
    return WARN, found, pip_install("slot")


def _memory() -> _Result:
    free = memory_free()
    if free is None or free >= _MIN_MEMORY:
        return OK, "unknown" if free is None else f"{_size(free)} free"
    advice = "the demo model needs 2 GiB; raise the container's limit, or end something"
    return WARN, f"{_size(free)} free", advice


def _shared_memory() -> _Result:
    try:
        free = shutil.disk_usage("/dev/shm").free
    except OSError as error:
        advice = "mount -t tmpfs tmpfs /dev/shm, or docker run --ipc=host"
        return FAIL, f"cannot be used: {error.strerror}", advice
    if free >= _MIN_SHM:
        return OK, f"{_size(free)} free"
    found = f"{_size(free)} free, of which Triton and its models need {_size(_MIN_SHM)}"
    advice = "docker run --shm-size=1g, or remove what ended programs left in /dev/shm"
    return FAIL, found, advice


def _disk(home: Path) -> _Result:
    folder = next(p for p in (home, *home.parents) if p.exists())
    if not os.access(folder, os.W_OK):
        return FAIL, f"{folder} cannot be written", "set TIDEGATE_HOME to a folder that can"
    free = shutil.disk_usage(folder).free
    found = f"{_size(free)} free in {folder}"
    if free >= _MIN_DISK:
        return OK, found
    return WARN, found, "make room, or set TIDEGATE_HOME to a folder on another disk"


def _files() -> _Result:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return OK, "no limit"
    if soft >= _MIN_FILES:
        return OK, f"{soft} at most"
    can = f"ulimit -n {hard}" if hard > soft else "raise LimitNOFILE or /etc/security/limits"
    return WARN, f"{soft} at most: each client takes one", f"{can}, before tidegate up"


def _port(host: str, port: int) -> _Result:
    where = host_port(host, port)
    remedy = "take a free one with tidegate up --port 0, or another with --port"
    try:
        require_free(host, port, remedy)
    except PortInUse as error:
        return WARN, f"{where} cannot be listened on", str(error)
    return OK, f"{where} is free"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit()) or (0,)


def _size(size: float) -> str:
    return f"{size / _GIB:.1f} GiB" if size >= _GIB else f"{size / _MIB:.0f} MiB"
