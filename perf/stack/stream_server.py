"""A small HTTP server whose streams get a token each in every step, as an engine gives them.

Both the servers of other kinds (``other_servers``) and the routers' backend (``peers.mock``) are
built on it. Each token is an event and a write of its own. Bare asyncio, no framework: it shares
the cores with what is measured.
"""

import asyncio
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final

import msgspec

from perf.load.connection import CONTENT_LENGTH

STREAM_HEAD: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)
LAST_CHUNK: Final = b"0\r\n\r\n"
_ANSWER: Final = (
    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
)


def chunk(payload: bytes) -> bytes:
    """A server-sent event as one chunk of a chunked body."""
    data = b"data: " + payload + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


class StepEngine:
    """Steps through the streams that run; asleep while there are none.

    With ``step_s`` 0 the steps follow one another as fast as the sockets take them.
    """

    def __init__(self, step_s: float) -> None:
        self.stops: list[float] = []
        """Times at which streams that were to have more tokens were dropped, on the machine's
        monotonic clock."""
        self._step_s = step_s
        self._streams: set[StreamConnection] = set()
        self._due = 0.0
        self._stepping = False
        self._loop = asyncio.get_running_loop()

    def add(self, stream: "StreamConnection") -> None:
        """Give ``stream`` a token in each step from now on."""
        self._streams.add(stream)
        if not self._stepping:
            self._stepping = True
            self._due = self._loop.time()
            self._next()

    def drop(self, stream: "StreamConnection") -> None:
        """Stop stepping ``stream``, which nobody is left to read."""
        if stream in self._streams:
            self._streams.discard(stream)
            self.stops.append(time.monotonic())

    def _next(self) -> None:
        if self._step_s:
            # On an absolute schedule: a late step does not delay those after it.
            self._due = max(self._due + self._step_s, self._loop.time())
            self._loop.call_at(self._due, self._step)
        else:
            self._loop.call_soon(self._step)

    def _step(self) -> None:
        for stream in [each for each in self._streams if each.step()]:
            self._streams.discard(stream)
        self._stepping = bool(self._streams)
        if self._stepping:
            self._next()


class StreamConnection(asyncio.Protocol, ABC):
    """One socket's requests, one after another: a POST begins a stream, a GET is answered with
    JSON."""

    def __init__(self, engine: StepEngine) -> None:
        self.engine = engine
        self._received = b""

    @abstractmethod
    def begin(self, path: bytes, body: bytes) -> None:
        """Begin the stream that a POST of ``body`` to ``path`` asks for."""

    @abstractmethod
    def step(self) -> bool:
        """Send a token; returns whether that was the last."""

    @abstractmethod
    def told(self, path: bytes) -> object:
        """Answer to a GET of ``path``, to be sent as JSON."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.engine.drop(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, separator, rest = self._received.partition(b"\r\n\r\n")
        if not separator:
            return
        length = CONTENT_LENGTH.search(head + b"\r\n")
        size = int(length[1]) if length is not None else 0
        if len(rest) < size:
            return
        self._received = rest[size:]
        path = head.split(b" ", 2)[1]
        if head.startswith(b"POST"):
            self.begin(path, rest[:size])
            self.transport.write(STREAM_HEAD)
            self.engine.add(self)
        else:
            body = msgspec.json.encode(self.told(path))
            self.transport.write(_ANSWER % (len(body), body))
            if b"connection: close" in head.lower():
                self.transport.close()


async def serve(
    port: int, step_ms: float, connection: Callable[[StepEngine], StreamConnection]
) -> asyncio.Server:
    """Listen on a port of the loopback interface; 0 takes a free one."""
    engine = StepEngine(step_ms / 1000)
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: connection(engine), "127.0.0.1", port)


def main(connection: Callable[[StepEngine], StreamConnection]) -> None:
    """Serve on the port and with the step in milliseconds that the command line names."""

    async def run() -> None:
        server = await serve(int(sys.argv[1]), float(sys.argv[2]), connection)
        await server.serve_forever()

    asyncio.run(run())
