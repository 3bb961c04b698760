"""What a run left behind: its processes and its shared memory, told from everyone else's by a
variable that every descendant inherits."""

import os
import re
import secrets
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_S = 60.0
_MARK = "TEST_RUN_OF_TIDEGATE"
_REGION = re.compile(r"/dev/shm/(tidegate_\S+)")


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
    condition: Callable[[], object], what: Callable[[], str], patience_s: float = PATIENCE_S
) -> None:
    """Wait until ``condition`` holds; ``what`` says what was missing when it never does."""
    give_up_at = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < give_up_at, what()
        time.sleep(0.05)


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _read(pid: int, name: str) -> bytes:
    """A file of a process, empty when it is gone; that of a zombie is empty by itself."""
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return b""
