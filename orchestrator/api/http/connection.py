"""The server and its clients' connections: limits the time for a request's head, detects hang-ups,
and replaces aiohttp's own error responses.

aiohttp lets a connection be silent for an hour. It buffers input after a running request, which
hides the end of input.
"""

import asyncio
import select
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import RequestHandler, _ErrInfo

from orchestrator.api.auth import is_admin_call, is_open_path
from orchestrator.api.config import CONFIG
from orchestrator.api.http.accepting import ConnectionLimit
from orchestrator.api.http.browsers import BROWSERS
from orchestrator.api.http.context import (
    DIALECTS,
    HTTP_ERRORS,
    ORCHESTRATOR,
    Context,
    new_context,
)
from orchestrator.api.http.deadlines import stated_deadline
from orchestrator.api.http.field_errors import must
from orchestrator.api.http.responses import error_response, name_response
from orchestrator.errors import InvalidRequest, NoCapacity, TidegateError
from orchestrator.telemetry.log import fields, service_log

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

HEADER_TIMEOUT_S: Final = 20.0
"""Seconds that a client has to send a request's head, from its first byte."""
RESERVED_HEADER_TIMEOUT_S: Final = 2.0
"""Seconds for a head on the connections that are reserved for operators."""
HANG_UP_S: Final = 0.005
"""Seconds from the end of a client's input until its connection is dropped. Requests that need no
wait, such as health checks, are answered within that time."""
_EXPECTED = "100-continue"
_NO_ROOM = (
    b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\nConnection: close\r\n"
    b"Content-Length: 0\r\n\r\n"
)
"""Response to a client that has not sent a request yet, so that its dialect is unknown."""

VANISHED_S = 30
"""Seconds within which the kernel detects a client whose machine or network is gone, or that does
not read its data."""
LOG_EVERY_S = 1.0
"""Shortest time in seconds between two log lines about malformed requests."""
_PROBE_AFTER_S = 15
_PROBE_EVERY_S = 5


def notice_vanished(client: socket.socket) -> None:
    """Make the kernel probe a silent client, and drop a client that reads or acknowledges nothing.
    Otherwise its task would run until its deadline, and sending would go on for 15 minutes."""
    with suppress(OSError):  # not a TCP socket, or already closed
        client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _PROBE_AFTER_S)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _PROBE_EVERY_S)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * VANISHED_S)


class HangUps:
    """Detects the end of a client's input with epoll while asyncio does not read the socket."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._calls: dict[int, Callable[[], None]] = {}
        self._epoll = select.epoll()
        loop.add_reader(self._epoll.fileno(), self._look)

    def watch(self, fd: int, call: Callable[[], None]) -> None:
        """Call ``call`` once, at the end of the peer's input. Replaces an earlier ``call``."""
        if fd not in self._calls:
            self._epoll.register(fd, select.EPOLLRDHUP)
        self._calls[fd] = call

    def unwatch(self, fd: int) -> None:
        """Stop watching a socket; call this before it is closed. No effect if it is not watched."""
        if self._calls.pop(fd, None) is not None:
            self._epoll.unregister(fd)

    def close(self) -> None:
        if not self._epoll.closed:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()

    def _look(self) -> None:
        for fd, _ in self._epoll.poll(0):
            call = self._calls.get(fd)
            self.unwatch(fd)
            if call is not None:
                call()


class Connection(RequestHandler):
    """One client's connection. It is closed if a request's head takes too long. A client that ends
    its input has hung up (WP-1). The kernel drops a client that reads nothing."""

    def __init__(self, server: "_Server", **options: Any) -> None:
        super().__init__(server, **options)
        self._server = server
        self._address: str | None = None
        self._fd = -1
        self._head_timer: asyncio.TimerHandle | None = None
        self._payload: StreamReader = EMPTY_PAYLOAD
        """Body of the last request with a complete head."""
        self._in_head = False
        """Whether the last bytes belong to an incomplete head."""
        self._is_hung_up = False
        self.answered_at = 0.0
        """``time.monotonic`` at the end of the last response; 0 before the first response."""
        self.is_reserved = False
        """Whether this connection is reserved for probes and operators."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self._address = str(peer[0]) if peer else ""
        client = transport.get_extra_info("socket")
        self._fd = client.fileno()
        notice_vanished(client)
        self.is_reserved = not self._server.limit.opened(self, self._address)
        if self.is_reserved:
            self._expect_head()

    @property
    def is_serving(self) -> bool:
        return self._current_request is not None

    @property
    def _is_idle(self) -> bool:
        """Whether all received requests are answered."""
        return self._waiter is not None and not self._waiter.done()

    def drop(self) -> None:
        """Close at once; unsent data may be lost."""
        transport = self.transport
        self.force_close()
        if transport is not None:
            transport.abort()

    def turn_away(self) -> None:
        """Close without reading the request."""
        transport = self.transport
        if transport is not None and not self.is_serving:
            transport.write(_NO_ROOM)
            if not transport.get_write_buffer_size():  # the kernel has all of it
                self.force_close()
                return
        self.drop()

    def data_received(self, data: bytes) -> None:
        # Parse the last byte that is not a line end, and everything after it, separately. A request
        # that ends there is complete, and no other request has begun.
        last = max(0, len(data.rstrip(b"\r\n")) - 1)
        if last:
            self._feed(data[:last])
        if self._feed(data[last:]) or not self._payload.is_eof():
            self._in_head = False
        elif data.strip(b"\r\n"):
            self._in_head = True
        is_first = len(self._messages) + self.is_serving < 2
        if (self._reading_paused and not is_first) or (self._buffer_paused and self._upgraded):
            self.drop()  # no handler will read it soon, and it would hide the end of input
            return
        if self.is_reserved:
            self._server.limit.heard(self)
        if not self._is_idle:  # a request has arrived
            self._stop_head_timer()
        elif self._in_head:
            self._expect_head()

    def _feed(self, data: bytes) -> bool:
        """Pass ``data`` to the parser. Returns whether it completed a request."""
        count, payload, was_whole = self._request_count, self._payload, self._payload.is_eof()
        super().data_received(data)
        if self._request_count == count:
            return payload.is_eof() and not was_whole
        if isinstance(self._messages[-1][0], _ErrInfo):
            whole = self._messages[-2][1] if len(self._messages) > 1 else payload
            if not whole.is_eof():
                self._break_off(whole)
            return False
        self._payload = self._messages[-1][1]
        return self._payload.is_eof()

    def _break_off(self, payload: StreamReader) -> None:
        """End a body that cannot be read further. Its request fails and is the last one."""
        self._messages.pop()
        payload.set_exception(web.RequestPayloadError("malformed"))
        payload.feed_eof()  # otherwise aiohttp waits for the rest
        self.close()

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio asks for one
        """Whether to keep the connection open for requests that can be answered at once."""
        if self._is_idle or not self._payload.is_eof():
            return False
        self._hang_up()
        return True

    def _hang_up(self) -> None:
        self._is_hung_up = True
        self._loop.call_later(HANG_UP_S, self.drop)

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        if self._close and isinstance(resp, web.StreamResponse):
            resp.force_close()
        finished = await super().finish_response(request, resp, start_time)
        self.answered_at = time.monotonic()
        if self._in_head and not self._messages:
            self._expect_head()
        if self._is_hung_up and not self._messages:
            self.close()
        return finished

    def _pause_transport_reading(self) -> None:
        super()._pause_transport_reading()
        if self.transport is not None:
            self._server.hang_ups.watch(self._fd, self._hang_up)  # the end follows unread bytes

    def _resume_transport_reading(self) -> None:
        self._server.hang_ups.unwatch(self._fd)
        super()._resume_transport_reading()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_head_timer()
        self._server.hang_ups.unwatch(self._fd)
        if self._address is not None:
            self._server.limit.closed(self, self._address, is_reserved=self.is_reserved)
            self._address = None
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer a request that the parser refused, or an error inside aiohttp."""
        if status < 500:
            return self._server.malformed(request, exc)
        if isinstance(exc, ConnectionError):  # the client is gone
            raise exc
        self.log_exception("request failed outside its handler", exc_info=exc)
        if request.writer.output_size:
            raise ConnectionError("the response ended early")
        return self._server.refused(request, TidegateError("an internal error occurred"))

    def log_exception(self, *args: Any, **options: Any) -> None:
        """Log an error without its message and traceback: they may contain users' content."""
        error = options.get("exc_info")
        if isinstance(error, web.RequestPayloadError):  # the client's error, already answered
            return
        reason = type(error).__name__ if isinstance(error, BaseException) else None
        service_log.error(str(args[0]).partition(":")[0], extra=fields(reason=reason))

    def log_debug(self, *args: Any, **options: Any) -> None:
        """Log nothing: these messages are about clients that disconnected."""

    def _expect_head(self) -> None:
        if self._head_timer is None:
            timeout_s = RESERVED_HEADER_TIMEOUT_S if self.is_reserved else HEADER_TIMEOUT_S
            self._head_timer = self._loop.call_later(timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_idle:  # otherwise checked after the running request
            self.drop()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


class ConnectionRunner(web.AppRunner):
    """An application runner with ``Connection`` objects."""

    async def _make_server(self) -> web.Server:
        return _Server(await super()._make_server(), self.app)


class _Server(web.Server):
    """Creates connections, and answers requests that reach no handler, in the dialect of their
    path. aiohttp would return the unreadable bytes as plain text and log them with a traceback,
    including a client's key or prompt (OR-16). ``made`` is aiohttp's server of ``app``."""

    def __init__(self, made: web.Server, app: web.Application) -> None:
        super().__init__(
            self._outermost(made.request_handler),
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            **made._kwargs,
        )
        self._app = app
        self._malformed = 0
        self._log_at = 0.0
        self.hang_ups = HangUps(self._loop)
        self.limit = ConnectionLimit(app[CONFIG].http.max_connections)

    def __call__(self) -> RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)

    async def shutdown(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - aiohttp's
        await super().shutdown(timeout)
        self.hang_ups.close()

    def _outermost(self, handle: Handle) -> Handle:
        """``handle``, after checks that aiohttp makes before any middleware, such as ``Expect``."""

        async def outermost(request: web.BaseRequest) -> web.StreamResponse:
            connection, refused = request.protocol, self.refused
            assert isinstance(connection, Connection)
            method, path = request.method, request.path
            for_operators = is_open_path(path) or is_admin_call(method, path)
            if connection.is_reserved and not for_operators:
                no_room = NoCapacity("too many open connections", retry_after_ms=1000.0)
                response = refused(request, no_room)
                response.headers.update(self._app[BROWSERS].headers(request.headers))
                return response
            if request.headers.get("Expect", _EXPECTED).lower() != _EXPECTED:
                # aiohttp's own response repeats the header and fails if the header is not text.
                return refused(request, must("Expect", "be 100-continue"))
            try:
                return await handle(request)
            except web.HTTPException as error:
                message = f"the request cannot be served: {error.reason}"
                return refused(request, InvalidRequest(message))

        return outermost

    def refused(self, request: web.BaseRequest, error: TidegateError) -> web.Response:
        """The response to a request that is refused before it reaches a handler."""
        context, policy = self._context(request), self._app[ORCHESTRATOR].deadlines
        context.deadline = stated_deadline(request.headers, context.arrival, policy)
        return self._answer(error, context)

    def malformed(self, request: web.BaseRequest, error: BaseException | None) -> web.Response:
        """The response to bytes that are not a request. It does not repeat or keep them."""
        context = self._context(request)
        self._malformed += 1
        if context.arrival.mono >= self._log_at:
            self._log_at = context.arrival.mono + LOG_EVERY_S
            service_log.info(
                "malformed HTTP request",
                extra=fields(
                    correlation_id=context.correlation_id,
                    reason=type(error).__name__,
                    count=self._malformed,
                ),
            )
            self._malformed = 0
        why = "it is not valid HTTP/1.1, or its length or a header is wrong"
        if isinstance(error, LineTooLong):
            why = "a line of its head is too long"
        return self._answer(InvalidRequest(f"the request cannot be read: {why}"), context)

    def _context(self, request: web.BaseRequest) -> Context:
        return new_context(request, self._app[ORCHESTRATOR].clock, self._app[DIALECTS])

    def _answer(self, error: TidegateError, context: Context) -> web.Response:
        self._app[HTTP_ERRORS].labels(context.dialect.status_of(error), error.code).inc()
        response = error_response(error, context, self._app[ORCHESTRATOR].clock.now())
        name_response(response, context)
        response.force_close()
        return response
