"""NVIDIA's own ``perf_analyzer``: found on the PATH, or fetched once out of a wheel.

The wheel ``tritonclient==2.50.0`` carries a binary that runs on Debian 12 and Ubuntu 22.04; later
wheels need a newer glibc. Two libraries that it is linked against come out of the Triton wheel,
where they lie under names with a hash.
"""

import asyncio
import os
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from catalog.paths import state_dir
from perf.report.command import Skip
from pool.engines.triton_wheel import wheel_dir

WHEEL = "tritonclient==2.50.0"
_BORROWED = {"libb64.so.0d": "libb64-*.so.0d", "libcudart.so.12": "libcudart-*.so.12*"}
_FETCH_S = 120.0


@dataclass(frozen=True, slots=True)
class PerfAnalyzer:
    """A ``perf_analyzer`` binary that was seen to run, and the environment that it needs."""

    binary: Path
    env: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Finished:
    """A command that ended, standard output and error together."""

    status: int
    output: str


async def find() -> PerfAnalyzer:
    """Find a ``perf_analyzer`` that runs here. Raises ``Skip`` with the reason when there is
    none."""
    on_path = shutil.which("perf_analyzer")
    found = (
        PerfAnalyzer(Path(on_path), dict(os.environ)) if on_path else await _fetched(state_dir())
    )
    probe = await execute([str(found.binary), "--version"], found.env, limit_s=20)
    if probe.status != 0:
        raise Skip(f"perf_analyzer does not run here: {probe.output.strip()[-300:]}")
    return found


async def execute(command: list[str], env: Mapping[str, str], *, limit_s: float) -> Finished:
    """Run ``command`` to its end, or kill it at ``limit_s`` and raise ``TimeoutError``."""
    process = await asyncio.create_subprocess_exec(
        *command,
        env=env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(limit_s):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return Finished(process.returncode, output.decode(errors="replace"))


async def _fetched(home: Path) -> PerfAnalyzer:
    target = home / WHEEL.replace("==", "-")
    binary = target / "bin" / "perf_analyzer"
    if not binary.exists():
        await _fetch(target)
    binary.chmod(0o755)
    libraries = target / "borrowed"
    libraries.mkdir(exist_ok=True)
    for name, pattern in _BORROWED.items():
        link = libraries / name
        for library in (wheel_dir(home) / "nvidia_pytriton.libs").glob(pattern):
            link.unlink(missing_ok=True)
            link.symlink_to(library)
    path = os.pathsep.join(filter(None, [str(libraries), os.environ.get("LD_LIBRARY_PATH")]))
    return PerfAnalyzer(binary, {**os.environ, "LD_LIBRARY_PATH": path})


async def _fetch(target: Path) -> None:
    """Unpack the wheel; a directory under its final name is complete."""
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command = [*pip, "--no-deps", "--only-binary=:all:", "--target", str(partial), WHEEL]
    try:
        fetched = await execute(command, dict(os.environ), limit_s=_FETCH_S)
    except TimeoutError:
        raise Skip(f"{WHEEL} could not be fetched within {_FETCH_S:.0f} s") from None
    if fetched.status != 0:
        raise Skip(f"{WHEEL} could not be fetched: {fetched.output.strip()[-300:]}")
    partial.rename(target)
