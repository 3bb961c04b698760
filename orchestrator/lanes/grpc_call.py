"""One gRPC call with messages in both directions, read and written on the event loop itself.

``grpc.aio`` passes a message through three threads: one reads the socket, one waits for the first
and wakes the event loop through a pipe, and the loop. This costs 150 to 200 µs of CPU for a frame
of one token. Here the loop reads the socket, ``h2`` parses the frames (5 to 7 µs each), and one
call passes on the received messages::

    socket ─▶ loop ─▶ h2 ─▶ messages ─▶ on_messages([…])

A call has its own connection, over TLS if configured. The peer's messages and TCP keepalive probes
show that it is alive; its pings are answered. A peer's GOAWAY (it will close the connection) is
reported while the call continues. Source:
https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""

import asyncio
import socket
import ssl
import struct
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any
from urllib.parse import unquote, urlsplit

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.exceptions import NoSuchStreamError, ProtocolError
from h2.settings import SettingCodes, Settings
from hpack.struct import Header
from hyperframe.frame import Frame, GoAwayFrame, SettingsFrame

from orchestrator.tls import SETTING, Tls, why_no_tls

_STREAM = 1
_PREFIX = struct.Struct(">BI")
"""Head of a gRPC message: whether it is compressed, and its length."""
_WINDOW = 4 * 1024 * 1024
"""Bytes that the peer may send before a window update."""
_DEFAULT_WINDOW = 65_535
_FRAME_HEAD_BYTES = 9
_MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""Maximum size of a received message in bytes; the largest real ones are rendered clips."""
_MAX_UNSENT_BYTES = 64 * 1024 * 1024
"""Maximum unsent bytes for a peer that does not read."""
_CONNECT_S = 1.0
"""Maximum seconds per address to answer, for a name with several addresses."""
_PROBES = 4
_PROBE_EVERY_S = 5
_TLS_ALERT = b"\x15\x03"
_OF_TLS = (ssl.SSLError, ConnectionResetError, ConnectionAbortedError)
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
"""gRPC's status names, by number."""


class CallEnded(Exception):
    """The call has ended. ``status`` is gRPC's status name; ``ok``: the peer only closed it."""

    def __init__(self, status: str, details: str) -> None:
        super().__init__(f"{status}: {details}")
        self.status = status


OnMessages = Callable[[list[bytes]], None]
"""Processes messages that arrived together, in order. An exception ends the call."""
OnLeaving = Callable[[], None]


async def open_call(
    address: str,
    method: str,
    on_messages: OnMessages,
    keepalive_s: float,
    tls: Tls | None = None,
    on_leaving: OnLeaving = lambda: None,
) -> "GrpcCall":
    """Connect to ``host:port`` and start ``method``. Raises ``CallEnded``. ``on_leaving`` is called
    when the peer will close the connection soon and accepts no new call."""
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
            is_of_tls = tls is not None and isinstance(error, _OF_TLS)
            failure = why_no_tls(error) if is_of_tls else str(error)
            await call.close()
        except asyncio.CancelledError:
            await call.close()
            raise
        else:
            call.keep_alive(keepalive_s)
            return call
    raise CallEnded("unavailable", f"cannot connect to {address}: {failure}")


def _same(call: "GrpcCall") -> "GrpcCall":
    return call


class _Connection(H2Connection):
    """A connection whose stream, unlike ``h2``'s, survives a GOAWAY (RFC 9113, 6.8)."""

    def __init__(self) -> None:
        super().__init__(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.local_settings = Settings(
            client=True,
            initial_values={SettingCodes.ENABLE_PUSH: 0, SettingCodes.INITIAL_WINDOW_SIZE: _WINDOW},
        )

    def _receive_goaway_frame(self, frame: GoAwayFrame) -> tuple[list[Frame], list[Event]]:
        state = self.state_machine.state
        answer = super()._receive_goaway_frame(frame)
        self.state_machine.state = state
        return answer


class GrpcCall(asyncio.Protocol):
    """A running call. Call all methods on the event loop's thread."""

    def __init__(
        self,
        address: str,
        method: str,
        on_messages: OnMessages,
        on_leaving: OnLeaving = lambda: None,
        *,
        is_secure: bool = False,
    ) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with ``CallEnded`` or the error of ``on_messages``; cancelled by ``close``."""
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
        self._http = _Connection()
        self._begin = b""
        """The first received bytes, until they show whether the peer speaks HTTP/2."""
        self._is_greeted = False
        """Whether the peer's settings, which start HTTP/2, have arrived."""
        self._last_words = ""
        self._partial = bytearray()
        """The received part of an incomplete message."""
        self._messages: list[bytes] = []
        self._outgoing = bytearray()

    # ── for callers ──────────────────────────────────────────────────────────────────────────

    def send(self, message: bytes) -> None:
        """Send a message when the peer has room. Never waits; drops a peer that does not read."""
        if self.ended.done():
            return
        self._outgoing += _PREFIX.pack(0, len(message))
        self._outgoing += message
        self._pump()
        unsent = len(self._outgoing)
        if self._transport is not None:
            unsent += self._transport.get_write_buffer_size()
        if unsent > _MAX_UNSENT_BYTES:
            self._fail(CallEnded("unavailable", f"it does not read: {unsent} bytes are unsent"))

    def finish(self) -> None:
        """End our side of the stream after all data is sent; the peer then ends the call. If a
        stream is cancelled instead after a refusal on it, Triton (24.10) keeps the connection's
        socket forever."""
        if self._transport is not None:
            self._http.end_stream(_STREAM)
            self._write()

    async def close(self) -> None:
        """Cancel the call, also at the peer. Returns when the socket is closed. Idempotent."""
        if not self.ended.cancel() and not self.ended.cancelled():
            self.ended.exception()  # it may never be awaited
        transport, self._transport = self._transport, None
        if transport is not None:
            with suppress(ProtocolError):  # the peer has already ended it
                self._http.reset_stream(_STREAM, ErrorCodes.CANCEL)
            transport.write(self._http.data_to_send())
            # A peer that does not read would keep the socket forever; gRPC servers send no TLS
            # close notify.
            if self._is_secure or transport.get_write_buffer_size():
                transport.abort()
            else:
                transport.close()
        if self._was_connected:
            await self._gone.wait()

    def keep_alive(self, idle_s: float) -> None:
        """Make the kernel probe a silent peer, and drop one that does not acknowledge."""
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
        self._http.initiate_connection()
        self._http.increment_flow_control_window(_WINDOW - _DEFAULT_WINDOW)
        self._http.send_headers(_STREAM, self._request)
        self._write()

    def data_received(self, data: bytes) -> None:
        try:
            try:
                self._read(data)
            finally:
                messages, self._messages = self._messages, []
                if messages and not self.ended.done():
                    self._on_messages(messages)
            self._pump()
        except ProtocolError as error:
            said = str(error)
            if isinstance(error, NoSuchStreamError):
                said = f"a frame for stream {error.stream_id}, which is not open"
            self._fail(CallEnded("internal", f"not HTTP/2 as expected: {said}"))
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
        if self._begin.startswith(_TLS_ALERT):
            return f"it speaks TLS: set {SETTING}"
        return (
            "the connection was closed at once: is that the port for gRPC, and in plain text? If "
            f"it speaks TLS, set {SETTING}"
        )

    # ── in ───────────────────────────────────────────────────────────────────────────────────

    def _read(self, data: bytes) -> None:
        if not self._is_greeted:
            self._begin += data
            if len(self._begin) < _FRAME_HEAD_BYTES:
                return
            self._greet(self._begin)
            data = self._begin
        for event in self._http.receive_data(data):
            self._take(event)

    def _greet(self, begin: bytes) -> None:
        """Check the peer's first bytes. Raises ``ProtocolError`` if they are not HTTP/2, and
        ``CallEnded`` for TLS or HTTP/1."""
        if begin.startswith(_TLS_ALERT):
            raise CallEnded("unavailable", f"it speaks TLS: set {SETTING}")
        if begin.startswith(b"HTTP/"):
            raise CallEnded("unavailable", "it speaks HTTP/1; is that the port for gRPC?")
        if begin[3] != SettingsFrame.type:
            raise ProtocolError(f"it begins with {begin[:16]!r}")
        self._is_greeted = True

    def _take(self, event: Event) -> None:
        match event:
            case DataReceived():
                self._http.acknowledge_received_data(event.flow_controlled_length, _STREAM)
                self._partial += event.data
                self._split()
            case ResponseReceived():
                self._take_head(event.headers, is_all=event.stream_ended is not None)
            case TrailersReceived():
                self._take_status(_texts(event.headers))
                raise CallEnded("internal", "the stream ended without a status")
            case StreamEnded():
                raise CallEnded("ok", "the stream ended")
            case StreamReset():
                why = _name_of(event.error_code)
                raise CallEnded("unavailable", f"the stream was reset ({why})")
            case ConnectionTerminated():
                # The peer accepts no more streams here, and ends this one later.
                words = (event.additional_data or b"").decode(errors="replace")
                said = words or f"the server is going away ({_name_of(event.error_code)})"
                if (event.last_stream_id or 0) < _STREAM:
                    raise CallEnded("unavailable", said)
                self._last_words = said
                self._on_leaving()

    def _split(self) -> None:
        """Extract complete messages from the received data."""
        data, at = self._partial, 0
        while len(data) - at >= _PREFIX.size:
            compressed, size = _PREFIX.unpack_from(data, at)
            if compressed:
                raise ProtocolError("a compressed message, which was not asked for")
            if size > _MAX_MESSAGE_BYTES:
                raise CallEnded(
                    "resource_exhausted",
                    f"a message of {size} bytes, more than the limit of {_MAX_MESSAGE_BYTES}",
                )
            stop = at + _PREFIX.size + size
            if stop > len(data):
                break
            self._messages.append(bytes(data[at + _PREFIX.size : stop]))
            at = stop
        del data[:at]

    def _take_head(self, stated: Iterable[Header], *, is_all: bool) -> None:
        """Check the headers of an answer; ``is_all``: the answer ends with them."""
        headers = _texts(stated)
        self._take_status(headers)
        if headers.get(":status") != "200":
            said = headers.get(":status", "none")
            raise CallEnded("unavailable", f"HTTP status {said} instead of a gRPC answer")
        kind = headers.get("content-type", "none")
        if not kind.startswith("application/grpc"):
            raise CallEnded("unavailable", f"content type {kind[:64]!r} instead of a gRPC answer")
        if is_all:
            raise CallEnded("internal", "the stream ended without a status")

    def _take_status(self, headers: Mapping[str, str]) -> None:
        """Raise ``CallEnded`` if the headers have the call's status."""
        status = headers.get("grpc-status")
        if status is not None:
            name = _STATUS_NAMES.get(int(status) if status.isdecimal() else -1, "unknown")
            raise CallEnded(name, unquote(headers.get("grpc-message", "")))

    # ── out ──────────────────────────────────────────────────────────────────────────────────

    def _pump(self) -> None:
        """Send as much as the peer's windows allow, and the pending frames of ``h2``."""
        if self._transport is None:
            return
        while self._outgoing:
            room = self._http.local_flow_control_window(_STREAM)
            size = min(len(self._outgoing), self._http.max_outbound_frame_size, room)
            if size <= 0:
                break
            self._http.send_data(_STREAM, bytes(self._outgoing[:size]))
            del self._outgoing[:size]
        self._write()

    def _write(self) -> None:
        data = self._http.data_to_send()
        if data and self._transport is not None:
            self._transport.write(data)

    # ── the end ──────────────────────────────────────────────────────────────────────────────

    def _fail(self, error: Exception) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.abort()


def _texts(headers: Iterable[Header]) -> dict[str, str]:
    return {str(name): str(value) for name, value in headers}


def _name_of(code: ErrorCodes | int | None) -> str:
    """A peer's error code in words."""
    return code.name.lower().replace("_", " ") if isinstance(code, ErrorCodes) else f"error {code}"
