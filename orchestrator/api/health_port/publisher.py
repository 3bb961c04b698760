"""The orchestrator's end of the health port: runs a responder and sends it the answers."""

import asyncio
import json
import socket
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from orchestrator.api.health_port import responder
from orchestrator.health import PreparedResponse
from orchestrator.helper_process import bare_environment
from orchestrator.telemetry.log import fields, service_log

PUBLISH_EVERY_S = 0.05
"""Seconds within which the port shows a change, plus the delay of the pipe."""
BEAT_EVERY_S = 0.5
"""Seconds between heartbeats of the event loop."""
_BACKLOG = 256
_RESTART_S = 0.5
_END_S = 1.0
_SCRIPT = Path(responder.__file__)

Answers = Callable[[], Mapping[str, PreparedResponse]]


class HealthPort:
    """Keeps one responder running and sends it the answers. While a responder is replaced, the
    socket stays open and checks wait."""

    def __init__(self, answers: Answers, host: str, port: int) -> None:
        """Raises ``OSError``."""
        self.answers = answers
        """The current answers, by path."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, port), family=family, backlog=_BACKLOG)
        self._runner: asyncio.Task[None] | None = None
        self.pid = 0
        """Process id of the responder; 0 if none is running."""

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def start(self) -> None:
        self._runner = asyncio.create_task(self._run(), name="health port")

    async def close(self) -> None:
        """Stop the responder and free the port."""
        self._listener.close()  # the responder answers the connections that wait
        if self._runner is not None:
            self._runner.cancel()
            with suppress(asyncio.CancelledError):
                await self._runner

    async def _run(self) -> None:
        while True:
            try:
                await self._respond()
                service_log.error("health responder ended; starting it again")
            except OSError as error:
                service_log.error(
                    "health responder failed; starting it again",
                    extra=fields(reason=error.strerror),
                )
            await asyncio.sleep(_RESTART_S)

    async def _respond(self) -> None:
        fd = self._listener.fileno()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            str(_SCRIPT),
            str(fd),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            pass_fds=(fd,),
            env=bare_environment(),
        )
        assert process.stdin is not None
        self.pid = process.pid
        ended = asyncio.create_task(process.wait())
        try:
            await self._publish(process.stdin, ended)
        finally:
            self.pid = 0
            process.stdin.close()  # makes the responder exit
            done, _ = await asyncio.wait([ended], timeout=_END_S)
            if not done:
                process.kill()
                await ended

    async def _publish(self, pipe: asyncio.StreamWriter, ended: asyncio.Task[int]) -> None:
        loop, transport = asyncio.get_running_loop(), pipe.transport
        published: Mapping[str, PreparedResponse] = {}
        beat_at = 0.0
        while not ended.done():
            # A responder that falls behind skips to the newest answers when it reads again.
            if not transport.get_write_buffer_size():
                answers = self.answers()
                if answers != published or loop.time() >= beat_at:
                    pipe.write(b"\n" if answers == published else _line(answers))
                    published, beat_at = answers, loop.time() + BEAT_EVERY_S
            await asyncio.wait([ended], timeout=PUBLISH_EVERY_S)


def _line(answers: Mapping[str, PreparedResponse]) -> bytes:
    """All answers as one line in the responder's input format."""
    by_path = {path: (answer.status, answer.body.decode()) for path, answer in answers.items()}
    return json.dumps(by_path).encode() + b"\n"
