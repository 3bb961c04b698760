"""A guarded process as the launcher sees it: starts it, asks it to end, knows that it has."""

import asyncio
import contextlib
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from catalog.errors import StartFailed
from catalog.paths import ROOT
from pool.process import guardian
from pool.process.logs import keep_bounded, open_log
from pool.process.proc import all_pids, stat_of

_GUARDIAN = Path(guardian.__file__)
_MARGIN_S = 1.0
"""Seconds that the guardian has beyond a grace for SIGKILL and waiting; then we do its work."""


def is_running(pid: int) -> bool:
    """Whether a process exists and has not ended (a zombie has)."""
    fields = stat_of(pid)
    return fields is not None and fields[0] not in "ZX"


def children_of(pid: int) -> list[int]:
    """Process ids of the live direct children of ``pid``."""
    return [child for child, state in _children(pid) if state not in "ZX"]


def has_ended_child(pid: int) -> bool:
    """Whether a direct child of ``pid`` has ended, and ``pid`` has not taken note of that."""
    return any(state == "Z" for _, state in _children(pid))


def _children(pid: int) -> list[tuple[int, str]]:
    """Direct children, each with its state as in ``/proc/PID/stat``."""
    found = ((child, stat_of(child)) for child in all_pids())
    return [(child, fields[0]) for child, fields in found if fields and int(fields[1]) == pid]


class UnitProcess(ABC):
    """One command under a guardian, as its keeper sees it."""

    def __init__(self, name: str, pid: int, log: Path | None) -> None:
        self.name = name
        self.pid = pid
        """The command's own process id, which is also its process group."""
        self._log = log
        self._ended = asyncio.create_task(self._watch(), name=f"watch {name}")

    @property
    def running(self) -> bool:
        """False once every process of it is gone."""
        return not self._ended.done()

    async def wait(self) -> int:
        """Wait until all of it is gone; returns the exit status (128 + signal, as in a shell)."""
        return await asyncio.shield(self._ended)

    async def end(self, grace_s: float) -> int:
        """Send SIGTERM, and SIGKILL after ``grace_s`` to what is left; returns the exit status."""
        self.order(grace_s)
        try:
            async with asyncio.timeout(grace_s + _MARGIN_S):
                return await self.wait()
        except TimeoutError:
            return await self.kill()

    async def kill(self) -> int:
        """Send SIGKILL to all of its processes at once; returns the exit status."""
        self.order(0.0)
        try:
            async with asyncio.timeout(_MARGIN_S):
                return await self.wait()
        except TimeoutError:  # the guardian itself is stuck (stopped, say): do its work
            self._kill_guardian()
            return await self.wait()

    @abstractmethod
    def order(self, grace_s: float) -> None:
        """Ask for its end without waiting: SIGTERM now, SIGKILL after ``grace_s``."""

    async def _watch(self) -> int:
        bounding = asyncio.create_task(keep_bounded(self._log)) if self._log else None
        try:
            return await self._guardian_end()
        finally:
            if bounding is not None:
                bounding.cancel()

    @abstractmethod
    async def _guardian_end(self) -> int:
        """Wait for the guardian, clean up after a killed one; returns the command's status."""

    @abstractmethod
    def _kill_guardian(self) -> None: ...


StartProcess = Callable[..., Awaitable[UnitProcess]]
"""Starts a unit's process, as ``GuardedProcess.start`` does."""


class GuardedProcess(UnitProcess):
    """One command under a guardian that ends with us, with its output in a log file.

    ``end`` and ``kill`` return once no process and no shared memory of it is left.
    """

    def __init__(
        self,
        name: str,
        process: asyncio.subprocess.Process,
        pid: int,
        shm: str,
        log: Path | None = None,
    ) -> None:
        self._guardian = process
        self._shm_prefix = shm
        super().__init__(name, pid, log)

    @classmethod
    async def start(
        cls,
        name: str,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path | None,
        shm_prefix: str = "",
    ) -> "GuardedProcess":
        """Start ``command`` under a guardian; ``log`` None sends its output to our stderr. Raises
        ``StartFailed`` if it cannot be executed at all."""
        try:
            with contextlib.ExitStack() as stack:
                stderr = stack.enter_context(open_log(log)) if log else sys.stderr
                process = await asyncio.create_subprocess_exec(
                    *guardian_command(shm_prefix),
                    "--",
                    *command,
                    stdin=asyncio.subprocess.PIPE,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=stderr,
                    env=dict(env),
                    start_new_session=True,
                )
        except OSError as error:  # no more processes, files or memory; a log that has just gone
            raise StartFailed(f"{name}: cannot start: {error}") from error
        assert process.stdin is not None and process.stdout is not None
        try:
            first_line = await process.stdout.readline()
        except asyncio.CancelledError:
            process.stdin.write(b"0\n")
            raise
        if not first_line:
            await process.wait()
            raise cannot_run(name, command, log)
        return cls(name, process, int(first_line), shm_prefix, log)

    def order(self, grace_s: float) -> None:
        stdin = self._guardian.stdin
        assert stdin is not None
        if not stdin.is_closing():
            stdin.write(f"{grace_s}\n".encode())

    def _kill_guardian(self) -> None:
        self._guardian.kill()

    async def _guardian_end(self) -> int:
        status = await self._guardian.wait()
        # Its pipes end a turn of the loop later; the loop may be closed by then.
        self._guardian._transport.close()  # type: ignore[attr-defined]
        if status < 0:  # it was killed, so it has cleaned up nothing
            guardian.kill_group(self.pid)
            if self._shm_prefix:
                guardian.remove_shared_memory(self._shm_prefix)
        return status if status >= 0 else 128 - status


def guardian_command(shm_prefix: str) -> list[str]:
    """The guardian's command line up to its own options; ``--`` and the command to guard follow."""
    return [sys.executable, "-I", "-S", str(_GUARDIAN), f"--shm-prefix={shm_prefix}"]


def cannot_run(name: str, command: Sequence[str], log: Path | None) -> StartFailed:
    """The error for a command that could not be executed; its log has the reason."""
    where = f" (see {log})" if log else ""
    return StartFailed(f"{name}: cannot run {command[0]}{where}")


def command_environment(changes: Mapping[str, str | None]) -> dict[str, str]:
    """Our environment with ``changes``; a value of None removes the variable.

    Started commands import ``orchestrator`` or ``worker``, which are installed nowhere.
    """
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env: dict[str, str | None] = {**os.environ, "PYTHONPATH": path, **changes}
    return {name: value for name, value in env.items() if value is not None}
