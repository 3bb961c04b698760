"""Server-sent events to one client, written to the socket as soon as a token arrives (LB-3).

A stream takes bytes synchronously from the lane's reader and never blocks it (OR-11)::

    send ──┬─ direct ─▶ socket                    while the socket takes everything at once
           └─ backlog ─▶ the handler, which writes as the client reads    once it does not

Informational events (``metrics``, ``narration``) are sent directly or dropped: a slow client loses
them, but never a token. A silent stream sends a comment before the keep-alive time ends, so that
no proxy closes the connection.

Headers are sent with the first event, but after one second at the latest. Before that, an error can
still be an HTTP status (DL-5). The limit keeps clients and proxies from a long wait for the first
byte (OR-23). A client is disconnected if its backlog exceeds the limit, or if it reads nothing for
too long while data waits.
"""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from socket import SO_SNDBUF, SOL_SOCKET
from typing import Final

import msgspec
from aiohttp import web

from orchestrator.errors import TidegateError

HEADERS_WITHIN_S = 1.0
"""Longest wait for the first event before a stream's headers are sent (OR-23)."""
CLIENT_BUFFER_BYTES: Final = 2**20
"""Largest backlog of a client before it is disconnected (OR-11)."""
KERNEL_BYTES: Final = 2**15
"""Approximate size of the kernel's send buffer for a client. The default is megabytes."""
CLIENT_TIMEOUT_S: Final = 10.0
"""Seconds after which a client is disconnected if data waits and it reads nothing."""
PAUSE_AFTER_S: Final = 0.5
"""Seconds that a client may be behind before its job may be paused for waiting jobs. The job
continues when the client has read the backlog."""
KEEP_ALIVE = b": still there\n\n"
_NO_FILE = -1
_PIECE = 64 * 1024
"""Bytes that a slow client must read within ``CLIENT_TIMEOUT_S``."""

SSE_HEADERS: Mapping[str, str] = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache, no-transform",
    "X-Accel-Buffering": "no",
}


_encode = msgspec.json.Encoder().encode


def event_of(kind: str, data: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), _encode(data))


class EventStream:
    def __init__(
        self, request: web.Request, headers: Mapping[str, str], keepalive_s: float
    ) -> None:
        """``keepalive_s``: longest silence before a comment is sent; 0: no limit."""
        self._request = request
        self.headers = {**SSE_HEADERS, **headers}
        """Headers of the response. They may change until the stream is served."""
        self._keepalive_s = keepalive_s
        self._backlog = bytearray()
        self._woken = asyncio.Event()
        self._finished = False
        self._refusal: TidegateError | None = None
        self._is_begun = False
        """Whether the headers are sent or about to be sent, so that the status is final."""
        self._transport: asyncio.Transport | None = None
        self._file = _NO_FILE
        """File descriptor of the socket. The stream writes to it directly while the transport's
        buffer is empty. This saves a sixth of the transport's time."""
        self._direct = False
        self._chunked = True
        self._quiet = True
        self.dropped = 0
        """Number of events that were dropped while the client was behind."""
        self.too_slow = False
        """Whether the client was disconnected because it did not read."""
        self.is_behind = False
        """Whether the client has been behind for a while and data waits for it."""
        self.on_behind: Callable[[], None] = lambda: None
        """Called when ``is_behind`` changes while the stream is served."""

    # ── synchronous side: called while a frame is being handed out ───────────────────────────

    def send(self, data: bytes) -> None:
        """Write one or more whole events. Never blocks. Drops the data if the client is gone."""
        if not data:  # an empty chunk would end the response
            return
        self._quiet = False
        if self._direct:
            self._write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
            return
        self._backlog += data
        if len(self._backlog) > CLIENT_BUFFER_BYTES:
            self.cut()
        self._woken.set()

    def _write(self, data: bytes) -> None:
        """Write while nothing is queued. Data that does not fit in the socket is queued first."""
        transport = self._transport
        assert transport is not None
        if transport.is_closing():  # its file descriptor may now belong to another connection
            return
        if self._file != _NO_FILE:
            try:
                sent = os.write(self._file, data)
            except OSError:  # full or broken; the transport detects a broken socket too
                sent = 0
            if sent == len(data):
                return
            data = data[sent:]
        transport.write(data)
        if transport.get_write_buffer_size():
            self._direct = False
            self._woken.set()

    def offer(self, data: bytes) -> None:
        """Write whole events, or drop them if the client is behind (OR-11)."""
        if self._direct:
            self.send(data)
        else:
            self.dropped += 1

    def finish(self, data: bytes = b"") -> None:
        self.send(data)
        self._finished = True
        self._woken.set()

    def cut(self) -> None:
        """Abort the connection. The client can ask again for the remaining events."""
        self.too_slow = True
        self._backlog.clear()
        if self._transport is not None:
            self._transport.abort()
        self._woken.set()

    def refuse(self, error: TidegateError) -> bool:
        """Answer with an HTTP error instead. Returns False if it is too late for a status."""
        if self._is_begun or self._backlog:
            return False
        self._refusal = error
        self._woken.set()
        return True

    # ── the handler's side ───────────────────────────────────────────────────────────────────

    async def run(self, past: Iterator[bytes] | None = None) -> web.StreamResponse:
        """Serve the stream to its end. With ``past``, the headers are sent at once, then the pieces
        of ``past``, each after the previous one is sent. Raises the error of ``refuse``, and
        ``ConnectionError`` or ``CancelledError`` if the client is gone."""
        if past is None:
            try:
                async with asyncio.timeout(HEADERS_WITHIN_S):
                    await self._woken.wait()
            except TimeoutError:
                self.send(KEEP_ALIVE)
        if self._refusal is not None:
            raise self._refusal
        self._is_begun = True
        response = web.StreamResponse(headers=self.headers)
        await response.prepare(self._request)
        transport = self._request.transport
        if transport is None:
            raise ConnectionResetError("the client is gone")
        self._chunked = response.headers.get("Transfer-Encoding") == "chunked"
        self._transport = transport
        socket = transport.get_extra_info("socket")
        if socket is not None:
            socket.setsockopt(SOL_SOCKET, SO_SNDBUF, KERNEL_BYTES)
            if transport.get_extra_info("sslcontext") is None:
                self._file = socket.fileno()
        # With this limit, draining waits until all bytes are sent.
        transport.set_write_buffer_limits(high=0)
        try:
            for piece in past or ():
                self._backlog += piece
                await self._catch_up(response)
            while True:
                self._woken.clear()
                await self._catch_up(response)
                if self._finished:
                    break
                self._direct = True
                await self._until_woken()
                self._direct = False
            async with asyncio.timeout(CLIENT_TIMEOUT_S):
                await response.write_eof()
        except TimeoutError:
            self.cut()
            raise ConnectionResetError("the client reads too slowly") from None
        finally:
            self._direct = False
        transport.set_write_buffer_limits()
        return response

    async def _until_woken(self) -> None:
        """Wait for the end or until the client is behind. Keeps the stream alive."""
        # Check twice per keep-alive time, so that no silence is longer.
        look_s = self._keepalive_s / 2 if self._keepalive_s else None
        while True:
            self._quiet = True
            try:
                async with asyncio.timeout(look_s):
                    await self._woken.wait()
                    return
            except TimeoutError:
                if self._quiet:
                    self.send(KEEP_ALIVE)

    def _tell_behind(self, is_behind: bool) -> None:
        if self.is_behind is not is_behind:
            self.is_behind = is_behind
            self.on_behind()

    async def _catch_up(self, response: web.StreamResponse) -> None:
        """Write the backlog at the client's pace. Raises ``TimeoutError`` if it is too slow."""
        timer = asyncio.get_running_loop().call_later(PAUSE_AFTER_S, self._tell_behind, True)
        try:
            while not self.too_slow:
                async with asyncio.timeout(CLIENT_TIMEOUT_S):
                    await self._request.writer.drain()
                    if not self._backlog:
                        break
                    piece = bytes(self._backlog[:_PIECE])
                    del self._backlog[:_PIECE]
                    await response.write(piece)
            else:
                raise TimeoutError
        finally:
            timer.cancel()
        self._tell_behind(False)
