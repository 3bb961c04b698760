"""One gRPC call with messages both ways, read and written on the event loop itself.

``grpc.aio`` takes a message through three threads: one that reads the socket, one that waits for
the first and wakes the event loop through a pipe, and the loop. A frame of one token costs 150 to
200 µs of CPU that way. Here the loop reads the socket, and what has come is handed over at once,
in one call for everything that came together::

    socket ─▶ loop ─▶ HTTP/2 frames ─▶ messages ─▶ on_messages([…])

A call has a connection of its own, in plain text. What proves that the peer is alive are its
messages and TCP's own probes; the peer's pings are answered.
Source: https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from urllib.parse import unquote, urlsplit

import grpc
from hpack import Decoder, Encoder, HPACKError

from orchestrator.lanes.http2 import (
    CANCEL,
    DEFAULT_FRAME_BYTES,
    DEFAULT_WINDOW,
    HEAD,
    HEAD_BYTES,
    PREFACE,
    Flag,
    Http2Error,
    Kind,
    Setting,
    frame,
    read_number,
    read_settings,
    reset,
    settings,
    unpadded,
    window_update,
)

_STREAM = 1
_PREFIX = struct.Struct(">BI")
"""Of a gRPC message: whether it is compressed, and its length."""
_WINDOW = 4 * 1024 * 1024
"""What the peer may send ahead of being told that more is welcome."""
_BUFFER = 256 * 1024
_MOST_HEADER_BYTES = 64 * 1024
_CONNECT_S = 1.0
"""How long each address of a name with several may take to answer."""
_PROBES = 4
_PROBE_EVERY_S = 5
_STATUS_NAMES = {code.value[0]: code.name.lower() for code in grpc.StatusCode}


class CallEnded(Exception):
    """The call is over. ``status`` is gRPC's name for how; ``ok``: the peer just closed it."""

    def __init__(self, status: str, details: str) -> None:
        super().__init__(f"{status}: {details}")
        self.status = status


OnMessages = Callable[[list[bytes]], None]
"""Takes what came together, in order. What it raises ends the call."""


async def open_call(
    address: str, method: str, on_messages: OnMessages, keepalive_s: float
) -> "GrpcCall":
    """Connect to ``host:port`` and begin ``method``. Raises ``CallEnded``."""
    loop = asyncio.get_running_loop()
    try:
        parts = urlsplit(f"//{address}")
        if not parts.hostname or not parts.port:
            raise ValueError("expected host:port")
        found = await loop.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise CallEnded("unavailable", f"cannot connect to {address}: {error}") from error
    failure: OSError | None = None
    for *_, where in found:
        call = GrpcCall(address, method, on_messages)
        try:
            async with asyncio.timeout(_CONNECT_S if len(found) > 1 else None):
                await loop.create_connection(partial(_same, call), str(where[0]), int(where[1]))
        except OSError as error:  # TimeoutError is one
            failure = error
            await call.close()
        except asyncio.CancelledError:
            await call.close()
            raise
        else:
            call.keep_alive(keepalive_s)
            return call
    raise CallEnded("unavailable", f"cannot connect to {address}: {failure}") from failure


def _same(call: "GrpcCall") -> "GrpcCall":
    return call


class GrpcCall(asyncio.BufferedProtocol):
    """A call that is under way. Every method is for the event loop's thread."""

    def __init__(self, address: str, method: str, on_messages: OnMessages) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with ``CallEnded``, or what ``on_messages`` raised; cancelled by ``close``."""
        self._on_messages = on_messages
        self._request = (
            (":method", "POST"),
            (":scheme", "http"),
            (":path", method),
            (":authority", address),
            ("te", "trailers"),
            ("content-type", "application/grpc"),
            ("user-agent", "tidegate"),
        )
        self._transport: asyncio.Transport | None = None
        self._was_connected = False
        self._gone = asyncio.Event()
        # in
        self._buffer = bytearray(_BUFFER)
        self._view = memoryview(self._buffer)
        self._filled = 0
        self._partial = bytearray()
        self._messages: list[bytes] = []
        self._unacknowledged = 0
        self._headers = Decoder()
        self._header_block = bytearray()
        self._headers_end_stream = False
        self._last_words = ""
        # out
        self._outgoing = bytearray()
        self._windows = {0: DEFAULT_WINDOW, _STREAM: DEFAULT_WINDOW}
        self._initial_window = DEFAULT_WINDOW
        self._frame_bytes = DEFAULT_FRAME_BYTES

    # ── for who calls ────────────────────────────────────────────────────────────────────────

    def send(self, message: bytes) -> None:
        """Send a message, now or as soon as the peer has room. Never waits."""
        self._outgoing += _PREFIX.pack(0, len(message))
        self._outgoing += message
        self._pump()

    def finish(self) -> None:
        """Say that no message is to come, once all that was sent is through; the peer then ends
        the call. A Triton (24.10) that sees a stream cancelled instead, after it has refused
        something there, keeps the connection's socket for good.
        """
        self._write(frame(Kind.DATA, Flag.END_STREAM, _STREAM, b""))

    async def close(self) -> None:
        """Cancel the call; the peer hears of it. Returns when the socket is closed. Idempotent."""
        if not self.ended.cancel() and not self.ended.cancelled():
            self.ended.exception()  # nobody may be left to ask for it
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.write(reset(_STREAM, CANCEL))
            if transport.get_write_buffer_size():  # one that reads nothing would keep it for good
                transport.abort()
            else:
                transport.close()
        if self._was_connected:
            await self._gone.wait()

    def keep_alive(self, idle_s: float) -> None:
        """Have the kernel probe a silent peer, and give up one that acknowledges nothing."""
        if self._transport is None:
            return
        own = self._transport.get_extra_info("socket")
        options = {
            "TCP_KEEPIDLE": max(1, int(idle_s)),
            "TCP_KEEPINTVL": _PROBE_EVERY_S,
            "TCP_KEEPCNT": _PROBES,
        }
        with suppress(OSError):
            own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in options.items():
                if hasattr(socket, name):
                    own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    # ── for the transport ────────────────────────────────────────────────────────────────────

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._was_connected = True
        ours = {Setting.ENABLE_PUSH: 0, Setting.INITIAL_WINDOW_SIZE: _WINDOW}
        block = Encoder().encode(self._request)
        transport.write(
            PREFACE
            + settings(ours)
            + window_update(0, _WINDOW - DEFAULT_WINDOW)
            + frame(Kind.HEADERS, Flag.END_HEADERS, _STREAM, block)
        )

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        try:
            try:
                self._read_frames()
            finally:
                messages, self._messages = self._messages, []
                if messages and not self.ended.done():
                    self._on_messages(messages)
        except (Http2Error, HPACKError) as error:
            self._fail(CallEnded("internal", f"not HTTP/2 as expected: {error}"))
        except Exception as error:
            self._fail(error)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone.set()
        words = self._last_words or (str(exc) if exc else "the connection was closed")
        self._fail(CallEnded("unavailable", words))

    # ── in ───────────────────────────────────────────────────────────────────────────────────

    def _read_frames(self) -> None:
        buffer, at, filled = self._buffer, 0, self._filled
        while filled - at >= HEAD_BYTES:
            word, flags, stream = HEAD.unpack_from(buffer, at)
            start = at + HEAD_BYTES
            stop = start + (word >> 8)
            if stop > filled:
                if word >> 8 > DEFAULT_FRAME_BYTES:
                    raise Http2Error(f"a frame of {word >> 8} bytes")
                break
            at = stop
            kind = word & 0xFF
            if kind == Kind.DATA:
                self._take_data(start, stop, flags)
            else:
                self._take_control(kind, flags, stream, bytes(self._view[start:stop]))
        if at:
            buffer[: filled - at] = buffer[at:filled]
            self._filled = filled - at

    def _take_data(self, start: int, stop: int, flags: int) -> None:
        self._unacknowledged += stop - start
        if flags & Flag.PADDED:
            self._partial += unpadded(bytes(self._view[start:stop]), flags)
            self._split_partial()
        elif self._partial:
            self._partial += self._view[start:stop]
            self._split_partial()
        else:
            taken = self._split(self._view[start:stop])
            self._partial += self._view[start + taken : stop]
        if self._unacknowledged >= _WINDOW // 2:
            count, self._unacknowledged = self._unacknowledged, 0
            self._write(window_update(0, count) + window_update(_STREAM, count))
        if flags & Flag.END_STREAM:
            raise CallEnded("ok", "the stream ended")

    def _split_partial(self) -> None:
        with memoryview(self._partial) as data:
            taken = self._split(data)
        del self._partial[:taken]

    def _split(self, data: memoryview) -> int:
        """Cut whole messages off; returns how many bytes they were."""
        at = 0
        while len(data) - at >= _PREFIX.size:
            compressed, size = _PREFIX.unpack_from(data, at)
            if compressed:
                raise Http2Error("a compressed message, which was not asked for")
            stop = at + _PREFIX.size + size
            if stop > len(data):
                break
            self._messages.append(bytes(data[at + _PREFIX.size : stop]))
            at = stop
        return at

    def _take_control(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        match kind:
            case Kind.HEADERS | Kind.CONTINUATION:
                self._header_block += unpadded(payload, flags)
                if len(self._header_block) > _MOST_HEADER_BYTES:
                    raise Http2Error("headers without end")
                if kind == Kind.HEADERS:
                    self._headers_end_stream = bool(flags & Flag.END_STREAM)
                if flags & Flag.END_HEADERS:
                    self._take_headers()
            case Kind.SETTINGS if not flags & Flag.ACK:
                self._take_settings(read_settings(payload))
            case Kind.PING if not flags & Flag.ACK:
                self._write(frame(Kind.PING, Flag.ACK, 0, payload))
            case Kind.WINDOW_UPDATE:
                if stream in self._windows:
                    self._windows[stream] += read_number(payload)
                    self._pump()
            case Kind.RST_STREAM:
                raise CallEnded(
                    "unavailable", f"the stream was reset (error {read_number(payload)})"
                )
            case Kind.GOAWAY:
                self._last_words = payload[8:].decode(errors="replace") or self._last_words
                if read_number(payload) < _STREAM:
                    raise CallEnded("unavailable", self._last_words or "the server takes no calls")
            case Kind.PUSH_PROMISE:
                raise Http2Error("a push, which was not asked for")

    def _take_settings(self, values: dict[int, int]) -> None:
        window = values.get(Setting.INITIAL_WINDOW_SIZE, self._initial_window)
        self._windows[_STREAM] += window - self._initial_window
        self._initial_window = window
        self._frame_bytes = values.get(Setting.MAX_FRAME_SIZE, self._frame_bytes)
        self._write(frame(Kind.SETTINGS, Flag.ACK, 0))
        self._pump()

    def _take_headers(self) -> None:
        block, self._header_block = bytes(self._header_block), bytearray()
        headers = {str(name): str(value) for name, value in self._headers.decode(block)}
        status = headers.get("grpc-status")
        if status is not None:
            name = _STATUS_NAMES.get(int(status) if status.isdecimal() else -1, "unknown")
            raise CallEnded(name, unquote(headers.get("grpc-message", "")))
        elif headers.get(":status", "200") != "200":
            raise CallEnded(
                "unavailable", f"HTTP status {headers[':status']} instead of a gRPC answer"
            )
        elif self._headers_end_stream:
            raise CallEnded("internal", "the stream ended without a status")

    # ── out ──────────────────────────────────────────────────────────────────────────────────

    def _pump(self) -> None:
        """Send what the peer's windows allow."""
        windows = self._windows
        while self._outgoing:
            size = min(len(self._outgoing), self._frame_bytes, *windows.values())
            if size <= 0:
                return
            piece = bytes(self._outgoing[:size])
            del self._outgoing[:size]
            for stream in windows:
                windows[stream] -= size
            self._write(frame(Kind.DATA, 0, _STREAM, piece))

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    # ── the end ──────────────────────────────────────────────────────────────────────────────

    def _fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()
