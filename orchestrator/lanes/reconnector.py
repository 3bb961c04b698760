"""Runs successive sessions with one peer, with a growing pause between them.

::

    start ─▶ session ─▶ ended (told) ─▶ pause ─▶ session … ─▶ close ─▶ ended for good (told)

A session is a coroutine that connects and serves until it ends with an exception. When it is up,
the pauses are reset to the shortest.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from orchestrator.lanes.config import OPEN_TIMEOUT_S
from orchestrator.telemetry.log import fields, lane_log

FIRST_PAUSE_S: Final = 0.1
"""Seconds between a failed session and the next: a restart is noticed soon, without a busy loop."""
LONGEST_PAUSE_S: Final = 2.0
"""Maximum seconds of that pause."""
GROWTH: Final = 1.1
"""Factor between pauses: a peer that loads for seconds is noticed a tenth of that time later."""


@dataclass(frozen=True, slots=True)
class SessionEnd:
    """How a session ended."""

    reason: str
    """Why it ended; empty if it was closed."""
    error: BaseException | None = None
    """Its exception; None if it was broken off or closed."""
    is_closed: bool = False
    """Whether it is the last session."""


class Reconnector:
    """Keeps a session with ``address`` until it is closed. The owner may set ``growth`` and
    ``longest_pause_s`` of the pauses. ``expected``: exceptions of a session whose peer fails, with
    a readable message; other exceptions are logged as errors with a traceback."""

    def __init__(
        self,
        what: str,
        address: str,
        session: Callable[[], Coroutine[None, None, None]],
        on_end: Callable[[SessionEnd], Awaitable[None]],
        *,
        rng: random.Random,
        expected: tuple[type[Exception], ...],
    ) -> None:
        self._what = what
        self._address = address
        self._make_session = session
        self._on_end = on_end
        self._rng = rng
        self._expected = expected
        self._pause_s = FIRST_PAUSE_S
        self.growth, self.longest_pause_s = GROWTH, LONGEST_PAUSE_S
        self._runner: asyncio.Task[None] | None = None
        self._session: asyncio.Task[None] | None = None
        self._breaking = ""
        """The reason of ``break_off``, until the session has ended."""

    def start(self) -> None:
        name = f"{self._what} {self._address}"
        self._runner = asyncio.create_task(self._run(), name=name)

    async def close(self) -> None:
        """End the session and start no other. Idempotent."""
        runner, self._runner = self._runner, None
        if runner is not None:
            runner.cancel()
            with suppress(asyncio.CancelledError):
                await runner

    def break_off(self, reason: str) -> None:
        """End this session, if any, and start another."""
        if self._session is not None:
            self._breaking = reason
            self._session.cancel()

    def is_up(self) -> None:
        self._pause_s = FIRST_PAUSE_S

    async def _run(self) -> None:
        while True:
            session = self._session = asyncio.create_task(self._make_session())
            try:
                await asyncio.wait([session])
            except asyncio.CancelledError:
                self._session = None
                session.cancel()
                await asyncio.wait([session])
                await self._on_end(SessionEnd("", is_closed=True))
                raise
            self._session = None
            end = self._end_of(session)
            self._breaking = ""
            await self._on_end(end)
            await asyncio.sleep(self._pause_s * self._rng.uniform(0.5, 1.0))
            self._pause_s = min(self.growth * self._pause_s, self.longest_pause_s)

    def _end_of(self, session: asyncio.Task[None]) -> SessionEnd:
        if session.cancelled():
            return SessionEnd(self._breaking or "the connection was closed")
        error = session.exception()
        if isinstance(error, TimeoutError):
            return SessionEnd(f"no answer within {OPEN_TIMEOUT_S:g} s", error)
        if isinstance(error, self._expected):
            return SessionEnd(str(error), error)
        lane_log.error(
            f"{self._what} failed unexpectedly; reconnecting",
            exc_info=error,
            extra=fields(instance=self._address),
        )
        return SessionEnd(f"unexpected {type(error).__name__}", error)
