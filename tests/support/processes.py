"""What a run left behind: its processes and its shared memory, told from everyone else's by a
variable that every descendant inherits."""

import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

PATIENCE_S = 120.0
"""How long something that is sure to come may take on a busy machine."""
_MARK = "TEST_RUN_OF_TIDEGATE"
_REGION = re.compile(r"/dev/shm/(tidegate_\S+)")


def python(
    *words: object, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """What a Python of its own says to ``words``; it ends well, or the test fails."""
    done = subprocess.run(
        [sys.executable, *map(str, words)], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done


class Marked:
    """Processes started with ``env`` or ``mark``, and all of their descendants."""

    def __init__(self) -> None:
        self._value = secrets.token_hex(8)
        self.mark = {_MARK: self._value}
        self.env = os.environ | self.mark

    def pids(self) -> list[int]:
        """Those that have not ended."""
        wanted = f"{_MARK}={self._value}".encode()
        return [pid for pid in _all_pids() if wanted in _read(pid, "environ").split(b"\0")]

    def regions(self) -> set[str]:
        """Names of the shared memory that they have mapped now."""
        maps = "".join(_read(pid, "maps").decode(errors="replace") for pid in self.pids())
        return set(_REGION.findall(maps))

    def wait_gone(self, regions: set[str], patience_s: float = PATIENCE_S) -> None:
        """Until no process and none of ``regions`` is left; ``AssertionError`` names what is."""

        def left() -> list[object]:
            return [*self.pids(), *(r for r in regions if Path("/dev/shm", r).exists())]

        eventually(lambda: not left(), lambda: f"these are left: {left()}", patience_s)


def eventually(
    condition: Callable[[], object], what: str | Callable[[], str], patience_s: float = PATIENCE_S
) -> None:
    """Wait until ``condition`` holds; ``what`` was missing when it never does, or says it then."""
    give_up_at = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < give_up_at, what if isinstance(what, str) else what()
        time.sleep(0.05)


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    """A file of a process, empty when it is gone; that of a zombie is empty by itself."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
