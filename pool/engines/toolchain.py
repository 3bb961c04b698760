"""Finds what this machine can run and build with: driver, compilers, caches.

Looking takes a second (``nvcc --version``, the driver's library), so the result is kept in the
state directory for ``TTL_S``, or until ``PATH`` changes.
"""

import hashlib
import os
import re
import shutil
import subprocess
import time
from pathlib import Path
from typing import Final

import msgspec

from catalog.atomic import write_atomically
from pool.preflight import gpu

TTL_S: Final = 3600.0
_VERSION: Final = re.compile(r"(\d+\.\d+(?:\.\d+)?)")
_PROBE_S: Final = 10.0
_TOOLS: Final = ("nvcc", "cc", "c++", "cmake", "ninja", "ccache", "git")


class Tool(msgspec.Struct, frozen=True):
    path: str
    version: str = ""
    """The tool's version; empty if it does not tell."""


class Toolchain(msgspec.Struct, frozen=True):
    """Tools of this machine. ``cuda`` is the newest version that the driver can do, or empty."""

    gpus: tuple[str, ...]
    cuda: str
    tools: dict[str, Tool]
    """Tools that are there, by name."""
    looked_ms: int
    path_digest: str = ""

    @property
    def ccache(self) -> str:
        """Path of ccache; empty if there is none."""
        return self.tools["ccache"].path if "ccache" in self.tools else ""


def toolchain(home: Path, ttl_s: float = TTL_S, *, refresh: bool = False) -> Toolchain:
    """The toolchain, looked up at most ``ttl_s`` ago. An unwritable state directory costs speed."""
    cached = home / "engines" / "toolchain.json"
    digest = hashlib.sha256(os.environ.get("PATH", "").encode()).hexdigest()
    now_ms = int(time.time() * 1000)
    if not refresh:
        try:
            found = msgspec.json.decode(cached.read_bytes(), type=Toolchain)
            if found.path_digest == digest and 0 <= now_ms - found.looked_ms < 1000 * ttl_s:
                return found
        except (OSError, msgspec.MsgspecError):
            pass
    found = msgspec.structs.replace(look(), looked_ms=now_ms, path_digest=digest)
    try:
        cached.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomically(cached, msgspec.json.encode(found))
    except OSError:
        pass
    return found


def look() -> Toolchain:
    """The toolchain as it is now."""
    devices = gpu.look()
    tools = {}
    for name in _TOOLS:
        path = shutil.which(name)
        if path is not None:
            tools[name] = Tool(path, _version(path))
    return Toolchain(devices.devices, devices.cuda, tools, 0)


def _version(path: str) -> str:
    try:
        told = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_S,
            check=False,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
    found = re.search(r"release (\S+?),", told) or _VERSION.search(told)
    return found[1] if found else ""
