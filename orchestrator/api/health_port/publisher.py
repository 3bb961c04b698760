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
"""Time within which a change shows on the port, not counting what the pipe takes."""
BEAT_EVERY_S = 0.5
"""Seconds between signs of life of the event loop."""
_BACKLOG = 256
_RESTART_S = 0.5
_END_S = 1.0
_SCRIPT = Path(responder.__file__)

Answers = Callable[[], Mapping[str, PreparedResponse]]


class HealthPort:
    """Keeps one responder running, and sends it the answers. The socket stays open while a
    responder is replaced; checks wait."""

    def __init__(self, answers: Answers, host: str, port: int, *, is_shared: bool = False) -> None:
        """``is_shared``: other processes listen there too. Raises ``OSError``."""
        self.answers = answers
        """The answers as they are now, by path."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server(
            (host, port), family=family, backlog=_BACKLOG, reuse_port=is_shared
        )
        self._runner: asyncio.Task[None] | None = None
        self.pid = 0
        """Process id of the responder; 0 while there is none."""

    @property
    def port(self) -> int:
        port: int = self._listener.getsockname()[1]
        return port

    def start(self) -> None:
        self._runner = asyncio.create_task(self._run(), name="health port")

    async def close(self) -> None:
        """End the responder; the port is free afterwards."""
        self._listener.close()  # what waits there is the responder's to answer
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
            process.stdin.close()  # makes the responder end
            done, _ = await asyncio.wait([ended], timeout=_END_S)
            if not done:
                process.kill()
                await ended

    async def _publish(self, pipe: asyncio.StreamWriter, ended: asyncio.Task[int]) -> None:
        loop, transport = asyncio.get_running_loop(), pipe.transport
        published: Mapping[str, PreparedResponse] = {}
        beat_at = 0.0
        while not ended.done():
            # A responder that falls behind gets the newest answers once it reads again, not those
            # between.
            if not transport.get_write_buffer_size():
                answers = self.answers()
                if answers != published or loop.time() >= beat_at:
                    pipe.write(b"\n" if answers == published else _line(answers))
                    published, beat_at = answers, loop.time() + BEAT_EVERY_S
            await asyncio.wait([ended], timeout=PUBLISH_EVERY_S)


def _line(answers: Mapping[str, PreparedResponse]) -> bytes:
    """All answers as one line in the form that the responder reads."""
    by_path = {path: (answer.status, answer.body.decode()) for path, answer in answers.items()}
    return json.dumps(by_path).encode() + b"\n"
