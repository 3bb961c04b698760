"""What all units have in common: one process under a guardian, and a log file of its own."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from catalog.errors import StartFailed
from pool.process.detached import DetachedProcess, Found
from pool.process.logs import ignore, tail, usable_log
from pool.process.process import UnitProcess
from pool.supervise import Keeping, first_of, missed_heartbeats

TERM_S = 1.5
"""Seconds from SIGTERM to SIGKILL: enough for a model's ``finalize``; Triton then polls once a
second."""
_POLL_S = 0.03


class ProcessUnit(ABC):
    """One process under supervision (``supervise.Unit``)."""

    start_s = 30.0
    """Seconds that a start may take."""

    def __init__(
        self,
        name: str,
        *,
        log: Path | None = None,
        warn: Callable[[str], None] = ignore,
        keeping: Keeping | None = None,
    ) -> None:
        self.name = name
        self._log_path = log
        self._log = log
        """Log file of this start's output; None for stderr."""
        self._warn = warn
        self._keeping = keeping or Keeping()
        self._process: UnitProcess | None = None
        self.misses = 0
        """Number of heartbeats without an answer, in all."""

    @property
    def pid(self) -> int | None:
        """Id of the process; None if there is none."""
        return self._process.pid if self._process else None

    @property
    def address(self) -> str:
        """The address for orchestrators; empty if they need none."""
        return ""

    @property
    def all_ports(self) -> tuple[int, int, int]:
        """Its ports for HTTP, gRPC and metrics; 0 for those that it does not have."""
        return 0, 0, 0

    @property
    def mark(self) -> str:
        """Name of the run of a detached process; empty for any other."""
        return self._process.found.label.mark if isinstance(self._process, DetachedProcess) else ""

    @property
    @abstractmethod
    def where(self) -> str:
        """The place where it can be reached, in words for a person."""

    @abstractmethod
    async def start(self) -> None:
        """Start it and wait until it serves. Raises ``StartFailed`` with the reason in its log."""

    async def attach(self, found: Found) -> None:
        """Take over a process that runs. Raises ``StartFailed`` if it has ended meanwhile."""
        self._process = await DetachedProcess.adopt(self.name, found, self._log)

    async def resume(self) -> None:
        """Wait until a process that was started, or taken over, serves. Raises ``StartFailed``."""
        assert self._process is not None, "start it first"
        deadline = time.monotonic() + self.start_s
        while not await self._answers():
            if not self._process.running:
                raise self._failure(await self._status())
            if time.monotonic() > deadline:
                raise self._failure(f"was not ready after {self.start_s:.0f} s")
            await asyncio.sleep(_POLL_S)

    async def stop(self, drain_s: float) -> None:
        """End it: running work may go on for ``drain_s``, and nothing is left on return."""
        if self._process is not None:
            await (self._process.end(TERM_S) if drain_s > 0 else self._process.kill())
            self._process = None

    async def lost(self) -> str:
        """Wait until it ends or hangs; returns which, in a few words."""
        return await first_of(self._process_end(), self._heartbeats())

    def kill(self) -> None:
        """Send SIGKILL, now; ``stop`` waits for the end of it."""
        if self._process is not None:
            self._process.order(0.0)

    async def _heartbeats(self) -> str:
        """Wait until too many heartbeats were missed; returns that."""

        def missed() -> None:
            self.misses += 1

        return await missed_heartbeats(self._answers, self._keeping.heartbeat_s, missed)

    @abstractmethod
    async def _answers(self) -> bool:
        """Whether it answers a heartbeat."""

    async def _spawn(
        self, command: Sequence[str], env: Mapping[str, str], shm_prefix: str = ""
    ) -> None:
        """Start the process with a fresh log. Raises ``StartFailed``."""
        self._log = usable_log(self._log_path, self._warn)
        self._process = await self._keeping.start_process(
            self.name, command, env=env, log=self._log, shm_prefix=shm_prefix
        )
        self._keeping.on_started()

    async def _process_end(self) -> str:
        return f"it {await self._status()}"

    async def _status(self) -> str:
        """Wait for the end of the process; returns ``ended with status 1``, say."""
        assert self._process is not None, "start it first"
        return f"ended with status {await self._process.wait()}"

    def _failure(self, what: str) -> StartFailed:
        """The error for a start that failed, with the reason that the log gives."""
        if self._log is None:
            return StartFailed(f"{self.name} {what}; its log above says why")
        reason = self._reason_in(self._log)
        return StartFailed(f"{self.name} {what}:\n{reason}\nThe whole log: {self._log}")

    def _reason_in(self, log: Path) -> str:
        return tail(log)
