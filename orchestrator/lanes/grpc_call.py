"""One gRPC call with messages both ways, read and written on the event loop itself.

``grpc.aio`` takes a message through three threads: one that reads the socket, one that waits for
the first and wakes the event loop through a pipe, and the loop. A frame of one token costs 150 to
200 µs of CPU that way. Here the loop reads the socket, and received messages are handed over in one
call::

    socket ─▶ loop ─▶ HTTP/2 frames ─▶ messages ─▶ on_messages([…])

A call has a connection of its own, over TLS if that is set. The peer's messages and TCP's own
probes prove that it is alive; its pings are answered. A peer's announcement that it will end the
connection (GOAWAY) is reported while the call continues. Source:
https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

import asyncio
import socket
import ssl
import struct
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit

from hpack import Decoder, Encoder, HPACKError

from orchestrator.lanes.http2 import (
    CANCEL,
    DEFAULT_FRAME_BYTES,
    DEFAULT_WINDOW,
    HEAD,
    HEAD_BYTES,
    MAX_STREAM,
    PREFACE,
    Flag,
    FrameType,
    Http2Error,
    Setting,
    check_frame,
    error_name,
    frame,
    read_number,
    read_settings,
    reset,
    settings,
    unpadded,
    widened,
    window_update,
)
from orchestrator.tls import SETTING, Tls, why_no_tls

_STREAM = 1
_PREFIX = struct.Struct(">BI")
"""Head of a gRPC message: whether it is compressed, and its length."""
_WINDOW = 4 * 1024 * 1024
"""Bytes that the peer may send before a window update."""
_BUFFER = 256 * 1024
_MAX_HEADER_BYTES = 64 * 1024
_MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""Largest message that is taken, in bytes; the largest that comes is a rendered clip."""
_MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""Most unsent bytes that are kept for a peer that reads nothing."""
_CONNECT_S = 1.0
"""Seconds that each address may take to answer, of a name with several."""
_PROBES = 4
_PROBE_EVERY_S = 5
_TLS_ALERT = b"\x15\x03"
_STATUS_NAMES = dict(
    enumerate(
        (
            "ok",
            "cancelled",
            "unknown",
            "invalid_argument",
            "deadline_exceeded",
            "not_found",
            "already_exists",
            "permission_denied",
            "resource_exhausted",
            "failed_precondition",
            "aborted",
            "out_of_range",
            "unimplemented",
            "internal",
            "unavailable",
            "data_loss",
            "unauthenticated",
        )
    )
)
"""gRPC's names of how a call ended, by number."""


class CallEnded(Exception):
    """The call is over. ``status`` is gRPC's name for how; ``ok``: the peer just closed it."""

    def __init__(self, status: str, details: str) -> None:
        super().__init__(f"{status}: {details}")
        self.status = status


OnMessages = Callable[[list[bytes]], None]
"""Takes messages that came together, in order. An exception that it raises ends the call."""
OnLeaving = Callable[[], None]


def _ignore() -> None:
    """Do nothing when the peer announces its end."""


async def open_call(
    address: str,
    method: str,
    on_messages: OnMessages,
    keepalive_s: float,
    tls: Tls | None = None,
    on_leaving: OnLeaving = _ignore,
) -> "GrpcCall":
    """Connect to ``host:port`` and begin ``method``. Raises ``CallEnded``.

    ``on_leaving`` hears that the peer will end the connection soon, and takes no new call on it.
    """
    loop = asyncio.get_running_loop()
    secure: dict[str, Any] = {}
    try:
        if tls is not None:
            secure = {
                "ssl": await asyncio.to_thread(tls.context),
                "server_hostname": tls.server_name or urlsplit(f"//{address}").hostname,
            }
        parts = urlsplit(f"//{address}")
        if not parts.hostname or not parts.port:
            raise ValueError("expected host:port")
        found = await loop.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except (OSError, ValueError) as error:
        raise CallEnded("unavailable", f"cannot connect to {address}: {error}") from error
    failure = ""
    for *_, where in found:
        call = GrpcCall(address, method, on_messages, on_leaving, is_secure=tls is not None)
        try:
            async with asyncio.timeout(_CONNECT_S if len(found) > 1 else None):
                await loop.create_connection(
                    partial(_same, call), str(where[0]), int(where[1]), **secure
                )
        except OSError as error:  # TimeoutError is one
            failure = _why_not(error, is_secure=tls is not None)
            await call.close()
        except asyncio.CancelledError:
            await call.close()
            raise
        else:
            call.keep_alive(keepalive_s)
            return call
    raise CallEnded("unavailable", f"cannot connect to {address}: {failure}")


def _why_not(error: OSError, *, is_secure: bool) -> str:
    is_of_tls = isinstance(error, ssl.SSLError | ConnectionResetError | ConnectionAbortedError)
    return why_no_tls(error) if is_secure and is_of_tls else str(error)


def _same(call: "GrpcCall") -> "GrpcCall":
    return call


class GrpcCall(asyncio.BufferedProtocol):
    """A running call. Every method is for the event loop's thread."""

    def __init__(
        self,
        address: str,
        method: str,
        on_messages: OnMessages,
        on_leaving: OnLeaving = _ignore,
        *,
        is_secure: bool = False,
    ) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with ``CallEnded``, or what ``on_messages`` raised; cancelled by ``close``."""
        self._on_messages = on_messages
        self._on_leaving = on_leaving
        self._is_secure = is_secure
        self._request = (
            (":method", "POST"),
            (":scheme", "https" if is_secure else "http"),
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
        self._is_greeted = False
        """Whether the peer's settings came, with which HTTP/2 begins."""
        self._is_answered = False
        """Whether the head of the peer's answer came."""
        self._headers = Decoder()
        self._header_block = bytearray()
        self._in_headers = False
        """Whether a CONTINUATION of the headers must follow at once."""
        self._headers_end_stream = False
        self._last_words = ""
        # out
        self._outgoing = bytearray()
        self._windows = {0: DEFAULT_WINDOW, _STREAM: DEFAULT_WINDOW}
        self._initial_window = DEFAULT_WINDOW
        self._frame_bytes = DEFAULT_FRAME_BYTES

    # ── for callers ──────────────────────────────────────────────────────────────────────────

    def send(self, message: bytes) -> None:
        """Send a message, now or as soon as the peer has room. Never waits; drops a peer with too
        much unsent data."""
        self._outgoing += _PREFIX.pack(0, len(message))
        self._outgoing += message
        self._pump()
        unsent = len(self._outgoing)
        if self._transport is not None:
            unsent += self._transport.get_write_buffer_size()
        if unsent > _MAX_UNSENT_BYTES:
            self._fail(
                CallEnded("unavailable", f"it does not read: {unsent} bytes wait to be sent")
            )

    def finish(self) -> None:
        """End our side of the stream, once all that was sent is through; the peer then ends the
        call. A Triton (24.10) that sees a stream cancelled instead, after it has refused something
        there, keeps the connection's socket for good.
        """
        self._write(frame(FrameType.DATA, Flag.END_STREAM, _STREAM, b""))

    async def close(self) -> None:
        """Cancel the call, also at the peer. Returns when the socket is closed. Idempotent."""
        if not self.ended.cancel() and not self.ended.cancelled():
            self.ended.exception()  # it may never be awaited
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.write(reset(_STREAM, CANCEL))
            # A peer that reads nothing would keep the socket for good; gRPC's servers say no
            # goodbye in TLS.
            if self._is_secure or transport.get_write_buffer_size():
                transport.abort()
            else:
                transport.close()
        if self._was_connected:
            await self._gone.wait()

    def keep_alive(self, idle_s: float) -> None:
        """Make the kernel probe a silent peer, and drop one that acknowledges nothing."""
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
        if self._is_secure:
            agreed = transport.get_extra_info("ssl_object").selected_alpn_protocol()
            if agreed != "h2":
                self._fail(CallEnded("unavailable", "it speaks TLS, and no HTTP/2 within"))
                return
        ours = {Setting.ENABLE_PUSH: 0, Setting.INITIAL_WINDOW_SIZE: _WINDOW}
        block = Encoder().encode(self._request)
        transport.write(
            PREFACE
            + settings(ours)
            + window_update(0, _WINDOW - DEFAULT_WINDOW)
            + frame(FrameType.HEADERS, Flag.END_HEADERS, _STREAM, block)
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

    def connection_lost(self, exc: Exception | None) -> None:
        self._gone.set()
        self._fail(CallEnded("unavailable", self._last_words or self._why_lost(exc)))

    def _why_lost(self, error: Exception | None) -> str:
        if self._is_secure and isinstance(error, ssl.SSLError):
            return why_no_tls(error)
        if self._is_greeted:
            return str(error) if error else "the connection was closed"
        if self._is_secure:
            return why_no_tls(error or ConnectionResetError())
        if bytes(self._view[: self._filled]).startswith(_TLS_ALERT):
            return f"it speaks TLS: set {SETTING}"
        return (
            "the connection was closed at once: is that the port for gRPC, and in plain text? If "
            f"it speaks TLS, set {SETTING}"
        )

    # ── in ───────────────────────────────────────────────────────────────────────────────────

    def _read_frames(self) -> None:
        buffer, at, filled = self._buffer, 0, self._filled
        while filled - at >= HEAD_BYTES:
            word, flags, stream = HEAD.unpack_from(buffer, at)
            if not self._is_greeted:
                self._greet(word & 0xFF, flags, bytes(self._view[at:filled]))
            start = at + HEAD_BYTES
            stop = start + (word >> 8)
            if stop > filled:
                if word >> 8 > DEFAULT_FRAME_BYTES:
                    raise Http2Error(f"a frame of {word >> 8} bytes")
                break
            at = stop
            kind = word & 0xFF
            if kind != FrameType.DATA or stream != _STREAM:
                stream &= MAX_STREAM  # one bit is reserved
                check_frame(kind, stream, stop - start, _STREAM)
            if self._in_headers and kind != FrameType.CONTINUATION:
                raise Http2Error("a header block was interrupted by another frame")
            if kind == FrameType.DATA:
                self._take_data(start, stop, flags)
            else:
                self._take_control(kind, flags, stream, bytes(self._view[start:stop]))
        if at:
            buffer[: filled - at] = buffer[at:filled]
            self._filled = filled - at

    def _greet(self, kind: int, flags: int, begin: bytes) -> None:
        """Check how the peer begins. Raises ``Http2Error`` if that is not how HTTP/2 begins, and
        ``CallEnded`` for TLS or HTTP/1."""
        if begin.startswith(_TLS_ALERT):
            raise CallEnded("unavailable", f"it speaks TLS: set {SETTING}")
        if begin.startswith(b"HTTP/"):
            raise CallEnded("unavailable", "it speaks HTTP/1; is that the port for gRPC?")
        if kind != FrameType.SETTINGS or flags & Flag.ACK:
            raise Http2Error(f"it begins with {begin[:16]!r}")
        self._is_greeted = True

    def _take_data(self, start: int, stop: int, flags: int) -> None:
        if not self._is_answered:
            raise Http2Error("data before the head of an answer")
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
        """Cut whole messages off ``data``; returns how many bytes they were."""
        at = 0
        while len(data) - at >= _PREFIX.size:
            compressed, size = _PREFIX.unpack_from(data, at)
            if compressed:
                raise Http2Error("a compressed message, which was not asked for")
            if size > _MAX_MESSAGE_BYTES:
                raise CallEnded(
                    "resource_exhausted",
                    f"a message of {size} bytes, and at most {_MAX_MESSAGE_BYTES} are taken",
                )
            stop = at + _PREFIX.size + size
            if stop > len(data):
                break
            self._messages.append(bytes(data[at + _PREFIX.size : stop]))
            at = stop
        return at

    def _take_control(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        match kind:
            case FrameType.HEADERS | FrameType.CONTINUATION:
                if kind == FrameType.CONTINUATION and not self._in_headers:
                    raise Http2Error("CONTINUATION without HEADERS")
                self._in_headers = not flags & Flag.END_HEADERS
                self._header_block += unpadded(payload, flags)
                if len(self._header_block) > _MAX_HEADER_BYTES:
                    raise Http2Error(f"headers of more than {_MAX_HEADER_BYTES} bytes")
                if kind == FrameType.HEADERS:
                    self._headers_end_stream = bool(flags & Flag.END_STREAM)
                if flags & Flag.END_HEADERS:
                    self._take_headers()
            case FrameType.SETTINGS if not flags & Flag.ACK:
                self._take_settings(read_settings(payload))
            case FrameType.PING if not flags & Flag.ACK:
                self._write(frame(FrameType.PING, Flag.ACK, 0, payload))
            case FrameType.WINDOW_UPDATE:
                count = read_number(payload)
                if not count:
                    raise Http2Error("a WINDOW_UPDATE of 0")
                self._windows[stream] = widened(self._windows[stream], count)
                self._pump()
            case FrameType.RST_STREAM:
                why = error_name(read_number(payload))
                raise CallEnded("unavailable", f"the stream was reset ({why})")
            case FrameType.GOAWAY:
                self._take_goaway(read_number(payload), read_number(payload, 4), payload[8:])
            case FrameType.PUSH_PROMISE:
                raise Http2Error("a push, which was not asked for")

    def _take_goaway(self, last_stream: int, error: int, words: bytes) -> None:
        """Handle that the peer begins no more streams here, and ends this one at its time."""
        said = words.decode(errors="replace") or f"the server is going away ({error_name(error)})"
        if last_stream < _STREAM:
            raise CallEnded("unavailable", said)
        self._last_words = said
        self._on_leaving()

    def _take_settings(self, values: dict[int, int]) -> None:
        window = values.get(Setting.INITIAL_WINDOW_SIZE, self._initial_window)
        self._windows[_STREAM] = widened(self._windows[_STREAM], window - self._initial_window)
        self._initial_window = window
        self._frame_bytes = values.get(Setting.MAX_FRAME_SIZE, self._frame_bytes)
        self._write(frame(FrameType.SETTINGS, Flag.ACK, 0))
        self._pump()

    def _take_headers(self) -> None:
        block, self._header_block = bytes(self._header_block), bytearray()
        headers = {str(name): str(value) for name, value in self._headers.decode(block)}
        status = headers.get("grpc-status")
        if status is not None:
            name = _STATUS_NAMES.get(int(status) if status.isdecimal() else -1, "unknown")
            raise CallEnded(name, unquote(headers.get("grpc-message", "")))
        if self._headers_end_stream and self._is_answered:
            raise CallEnded("internal", "the stream ended without a status")
        if headers.get(":status") != "200":
            said = headers.get(":status", "none")
            raise CallEnded("unavailable", f"HTTP status {said} instead of a gRPC answer")
        kind = headers.get("content-type", "none")
        if not kind.startswith("application/grpc"):
            raise CallEnded("unavailable", f"content type {kind[:64]!r} instead of a gRPC answer")
        if self._headers_end_stream:
            raise CallEnded("internal", "the stream ended without a status")
        self._is_answered = True

    # ── out ──────────────────────────────────────────────────────────────────────────────────

    def _pump(self) -> None:
        """Send as much as the peer's windows allow."""
        windows = self._windows
        while self._outgoing:
            size = min(len(self._outgoing), self._frame_bytes, *windows.values())
            if size <= 0:
                return
            piece = bytes(self._outgoing[:size])
            del self._outgoing[:size]
            for stream in windows:
                windows[stream] -= size
            self._write(frame(FrameType.DATA, 0, _STREAM, piece))

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
