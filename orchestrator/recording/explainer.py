"""Has a process of its own replay what surrounds a request that missed: one at a time.

The process is ``python -m perf.sim.replay``, above this package: it runs the whole service on
virtual time. It ends with its answer, or when that takes too long.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Final

import msgspec

from orchestrator.errors import NotReady, QueueFull, TidegateError
from orchestrator.helper_process import start_helper
from orchestrator.recording.facts import RecordedRequest
from orchestrator.recording.findings import Findings, ReplayQuestion
from orchestrator.recording.recorder import Recorder
from orchestrator.telemetry.log import fields, service_log

BUDGET_S: Final = 15.0
"""CPU time that the replays of one explanation may take, in seconds."""
PATIENCE_S: Final = 90.0
"""Seconds after which a replaying process that got too little CPU time is given up."""
MAX_WAITING: Final = 8
"""Most explanations that may wait for the one that is made."""
_REPLAY: Final = "perf.sim.replay"
_findings = msgspec.msgpack.Decoder(Findings)


class Explainer:
    """Answers why a recorded request missed."""

    def __init__(self, recorder: Recorder, settings: Callable[[], dict[str, Any]]) -> None:
        """``settings`` gives the sections by which the service decides now."""
        self.recorder = recorder
        self._settings = settings
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def explain(self, asked: RecordedRequest) -> Findings:
        """Replay what surrounds a request. Raises ``QueueFull`` where too many wait, ``NotReady``
        where the process does not answer in time."""
        if self._waiting >= MAX_WAITING:
            raise QueueFull(
                f"{self._waiting} explanations wait already, and one is made at a time: ask again "
                "in a moment",
                retry_after_ms=1000 * BUDGET_S,
            )
        self._waiting += 1
        try:
            async with self._turn:
                return await self._replay(asked)
        finally:
            self._waiting -= 1

    def question(self, asked: RecordedRequest, budget_s: float = BUDGET_S) -> ReplayQuestion:
        """The input of a replaying process."""
        return ReplayQuestion(self.recorder.around(asked), self._settings(), budget_s)

    async def _replay(self, asked: RecordedRequest) -> Findings:
        asking = msgspec.msgpack.encode(self.question(asked))
        try:
            process = await start_helper(_REPLAY, stderr=asyncio.subprocess.PIPE)
        except OSError as error:
            raise NotReady(f"no process could be started to replay it: {error.strerror}") from None
        try:
            async with asyncio.timeout(PATIENCE_S):
                answer, said = await process.communicate(asking)
        except TimeoutError:
            raise NotReady(
                f"the replay took more than {PATIENCE_S:g} s, since this machine is busy: ask again"
                " later",
                retry_after_ms=1000 * PATIENCE_S,
            ) from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode:
            last = said.decode(errors="replace").strip().rpartition("\n")[2]
            service_log.error("a replay failed", extra=fields(task_id=asked.id, reason=last))
            raise TidegateError("the replay failed; the service's log says why")
        return _findings.decode(answer)
