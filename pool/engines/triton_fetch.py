"""Fetches the wheel's Triton for ``tidegate up`` on a machine that has none."""

import asyncio
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from catalog.errors import FetchFailed, NoEngine
from pool.engines import triton_wheel as wheel
from pool.engines.triton import TritonInstall, find_triton
from pool.preflight.host import check_platform
from pool.process.logs import fresh_log, tail
from pool.process.process import GuardedProcess, command_environment

PIP = (sys.executable, "-P", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")


async def ensure_triton(
    configured: Path | None, home: Path, fetching: Callable[[str], None]
) -> TritonInstall:
    """The server to run, as ``find_triton`` finds it; the wheel's is fetched if there is none, and
    ``fetching`` is told of it first. Raises ``ProvisionError``."""
    try:
        return find_triton(configured, home)
    except NoEngine:
        what = f"none on this machine; fetching {wheel.SERVER_VERSION}"
        fetching(f"{what} ({wheel.WHEEL}, {wheel.DOWNLOAD_MB} MB) into {home}")
        await fetch_triton(home)
        return find_triton(configured, home)


async def fetch_triton(home: Path, pip: Sequence[str] = PIP) -> None:
    """Put the wheel's server below ``home``. pip finds its index as it always does.

    Raises ``MachineUnfit``, ``FetchFailed``, ``LogUnusable``; nothing is left of a download that
    was cancelled.
    """
    check_platform()
    if not wheel.is_downloaded(home):
        if pip is PIP and importlib.util.find_spec("pip") is None:
            raise FetchFailed(
                f"Cannot fetch {wheel.WHEEL}, the wheel that has the Triton server:"
                f" {sys.executable} has no pip; give it one (python -m ensurepip), or name a Triton"
                " server with --triton PATH (TIDEGATE_TRITON)."
            )
        log = home / "logs" / "fetch-triton.log"
        fresh_log(log)
        with wheel.completing(wheel.wheel_dir(home)) as target:
            await _install([*pip, "--target", str(target), *wheel.PIP_ARGUMENTS], log)
    await asyncio.to_thread(wheel.lay_out, home)


async def _install(command: Sequence[str], log: Path) -> None:
    process = await GuardedProcess.start("pip", command, env=command_environment({}), log=log)
    try:
        status = await process.wait()
    finally:
        await process.kill()
    if status != 0:
        raise FetchFailed(
            f"Cannot fetch {wheel.WHEEL}, the wheel that has the Triton server:\n{tail(log)}\n"
            "Without a network, give pip a mirror or a folder of wheels (PIP_INDEX_URL, "
            "PIP_FIND_LINKS), or name a Triton server with --triton PATH (TIDEGATE_TRITON)."
        )
