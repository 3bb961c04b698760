"""Connections: what never becomes a request is answered in our shape and leaves no content behind.

aiohttp answers what its parser refuses by itself, in plain text with the bytes that it could not
read, and logs them with a traceback: there a client's key or prompt would stand (OR-16). It gives a
connection an hour to say something, and takes as many as there are files to be had: here they are
bounded, in all and per address, and the last few are kept for probes and operators.
"""

import asyncio
import resource
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

from aiohttp import HttpVersion11, web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.streams import EMPTY_PAYLOAD, StreamReader
from aiohttp.web_protocol import RequestHandler, _ErrInfo

from orchestrator.api.auth import is_admin_call, is_open_path
from orchestrator.api.http.browsers import Browsers
from orchestrator.api.http.context import (
    CORRELATION_HEADER,
    ORCHESTRATOR,
    Context,
    error_response,
    new_context,
)
from orchestrator.api.http.event_stream import STREAM
from orchestrator.api.http.hang_ups import CAN_WATCH, HangUps, Prober, unacknowledged_bytes
from orchestrator.errors import InvalidRequest, NoCapacity, TidegateError
from orchestrator.service import Orchestrator
from orchestrator.telemetry.log import fields, service_log

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

KEPT_FILES = 256
"""Open files that clients' connections never take: lanes, logs, and what libraries need."""
KEPT_CONNECTIONS = 16
"""Of those allowed in all, for health checks, metrics and operators' calls only."""
KEPT_HEADER_TIMEOUT_S = 2.0
_ENOUGH_FILES = 65536
ACCEPT_BACKLOG = 192
"""So many are accepted at a time, before any can be closed: fewer than ``KEPT_FILES``."""
LEAST_CONNECTIONS = 2 * KEPT_CONNECTIONS
_MOST_PER_ADDRESS = 0.75
_LOG_EVERY_S = 1.0
"""A flood of malformed requests is one line a second."""
_ACCEPT_LOG_EVERY_S = 60.0
_EXPECTED = "100-continue"
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
"""The one interim response that every client of HTTP/1.1 takes, asked for or not."""


def raise_file_limit() -> int:
    """Let this process open as many files as it may; returns how many that is."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH_FILES)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return _ENOUGH_FILES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


class QuietAccept:
    """An event loop's exception handler: failing to accept is said once a minute, in one line."""

    def __init__(self) -> None:
        self._log_at = 0.0
        self._failures = 0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "accept" not in str(context.get("message")):
            loop.default_exception_handler(context)
            return
        self._failures += 1
        if loop.time() < self._log_at:
            return
        self._log_at = loop.time() + _ACCEPT_LOG_EVERY_S
        service_log.error(
            "cannot accept connections: %s",
            getattr(context.get("exception"), "strerror", None) or "out of resources",
            extra=fields(failures=self._failures),
        )
        self._failures = 0


class Runner(web.AppRunner):
    """An application's runner whose connections are ``Connection``."""

    async def _make_server(self) -> web.Server:
        return _Server(self.app[ORCHESTRATOR], await super()._make_server())


class _Server(web.Server):
    """Makes connections. ``made`` is aiohttp's own, for the application."""

    def __init__(self, orchestrator: Orchestrator, made: web.Server) -> None:
        super().__init__(
            self._outermost(made.request_handler),
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            **made._kwargs,
        )
        self.orchestrator = orchestrator
        self._browsers = Browsers(orchestrator.settings)
        self.hang_ups = HangUps(self._loop) if CAN_WATCH else None
        self._most = orchestrator.settings.max_connections
        self._by_address: Counter[str] = Counter()
        self._kept: dict[Connection, None] = {}
        """Connections beyond those for everybody, the longest silent first."""
        self._malformed = 0
        self._log_at = 0.0

    def __call__(self) -> RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)

    async def shutdown(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - aiohttp's
        await super().shutdown(timeout)
        if self.hang_ups is not None:
            self.hang_ups.close()

    def opened(self, connection: "Connection", address: str) -> bool:
        """Count a connection; False when it is not for everything.

        Of those the one that has been silent for longest makes room for the next.
        """
        usual = self._most - KEPT_CONNECTIONS
        own = self._by_address[address]
        if self._by_address.total() < usual and own < max(1, _MOST_PER_ADDRESS * usual):
            self._by_address[address] += 1
            return True
        if len(self._kept) >= KEPT_CONNECTIONS:
            silent = (other for other in self._kept if not other.is_serving)
            gone = next(silent, connection)
            self._kept.pop(gone, None)
            gone.drop()
        self._kept[connection] = None
        return False

    def heard(self, connection: "Connection") -> None:
        """One of the last few has said something: the others go before it."""
        if connection in self._kept:
            self._kept[connection] = self._kept.pop(connection)

    def closed(self, connection: "Connection", address: str) -> None:
        if connection.is_kept:
            self._kept.pop(connection, None)
            return
        self._by_address[address] -= 1
        if not self._by_address[address]:
            del self._by_address[address]

    def refused(self, error: TidegateError, context: Context) -> web.Response:
        """The answer to what no handler saw."""
        self.orchestrator.metrics.http_errors.labels(error.status, error.code).inc()
        response = error_response(error, context)
        response.headers[CORRELATION_HEADER] = context.correlation_id
        response.force_close()
        return response

    def malformed(self, error: BaseException | None, context: Context) -> web.Response:
        """The answer to what is no request; nothing of it is told or kept."""
        self._malformed += 1
        if context.arrival.mono >= self._log_at:
            self._log_at = context.arrival.mono + _LOG_EVERY_S
            service_log.info(
                "malformed HTTP request",
                extra=fields(
                    correlation_id=context.correlation_id,
                    reason=type(error).__name__,
                    count=self._malformed,
                ),
            )
            self._malformed = 0
        why = "it is not HTTP/1.1, or its length or a header is wrong"
        if isinstance(error, LineTooLong):
            why = "a line of its head is too long"
        return self.refused(InvalidRequest(f"the request cannot be read: {why}"), context)

    def _outermost(self, handle: Handle) -> Handle:
        """``handle`` with what aiohttp refuses before any middleware, such as an ``Expect``."""

        async def outermost(request: web.BaseRequest) -> web.StreamResponse:
            connection = request.protocol
            assert isinstance(connection, Connection)
            if connection.is_kept and not _is_for_operators(request):
                no_room = NoCapacity("too many connections are open", retry_after_ms=1000.0)
                response = self.refused(no_room, new_context(request, self.orchestrator.clock))
                response.headers.update(self._browsers.headers(request.headers))
                return response
            if request.headers.get("Expect", _EXPECTED).lower() != _EXPECTED:
                # aiohttp's own answer repeats it, and breaks off where it is no text.
                wrong = InvalidRequest("Expect must be 100-continue", field="Expect")
                return self.refused(wrong, new_context(request, self.orchestrator.clock))
            try:
                return await handle(request)
            except web.HTTPException as error:
                message = f"the request cannot be served: {error.reason}"
                return self.refused(
                    InvalidRequest(message), new_context(request, self.orchestrator.clock)
                )

        return outermost


class Connection(RequestHandler):
    """One client's. Closed when the head of a request takes too long to come, or when nothing of
    what is sent is read for as long as an idle connection may stand.

    A client that ends its side of the connection behind a whole request still gets its answer, as
    long as it is there to read it; see ``hang_ups``.
    """

    def __init__(self, server: _Server, **options: Any) -> None:
        super().__init__(server, **options)
        self._server = server
        self._address: str | None = None
        self._fd = -1
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._payload: StreamReader = EMPTY_PAYLOAD
        """Of the last request of which the head has come."""
        self._in_head = False
        """The last bytes belong to a request of which the head has not come yet."""
        self._discards = False
        """More came behind a running request than is kept: no more is read of the connection."""
        self._prober: Prober | None = None
        """The client's input has ended."""
        self.is_kept = False
        """One of the last few: for probes and operators only."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self._address = str(peer[0]) if peer else ""
        self._fd = transport.get_extra_info("socket").fileno()
        self.is_kept = not self._server.opened(self, self._address)
        if self.is_kept:
            self._expect_head()

    @property
    def is_serving(self) -> bool:
        """Whether a request is under way."""
        return self._current_request is not None

    @property
    def _is_idle(self) -> bool:
        """Every request that has come is answered."""
        return self._waiter is not None and not self._waiter.done()

    def drop(self) -> None:
        """Close at once: what is still to be sent may never be read."""
        transport = self.transport
        self.force_close()
        if transport is not None:
            transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            self._watch_writing()

    def _watch_writing(self) -> None:
        """Drop a client that takes nothing for as long as an idle connection may stand."""
        timeout_s = self._server.orchestrator.settings.idle_timeout_s
        held = self._unsent_bytes()

        def look() -> None:
            self._write_timer = None
            if self._unsent_bytes() < held:
                self._watch_writing()
            else:
                self.drop()

        self._write_timer = self._loop.call_later(timeout_s, look)

    def _unsent_bytes(self) -> int:
        """What we and the kernel hold for the client."""
        assert self.transport is not None
        ours: int = self.transport.get_write_buffer_size()
        return ours + unacknowledged_bytes(self._fd)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._discards:
            return
        # The last byte that is no line end, and all behind it, are looked at apart: a request that
        # ends with them is whole, and nothing of another has come.
        last = max(0, len(data.rstrip(b"\r\n")) - 1)
        if last:
            self._feed(data[:last])
        if self._feed(data[last:]) or not self._payload.is_eof():
            self._in_head = False
        elif data.strip(b"\r\n"):
            self._in_head = True
        is_first = len(self._messages) + self.is_serving < 2
        if (self._reading_paused and not is_first) or (self._buffer_paused and self._upgraded):
            self._discard_input()  # no handler is about to read it
        if self.is_kept:
            self._server.heard(self)
        if not self._is_idle:  # a request has come
            self._stop_head_timer()
        elif self._in_head:
            self._expect_head()

    def _feed(self, data: bytes) -> bool:
        """Hand ``data`` to the parser; whether a request became whole."""
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
        """A body that has begun cannot be read on: its request is told, and is the last."""
        self._messages.pop()
        payload.set_exception(web.RequestPayloadError("malformed"))
        payload.feed_eof()  # or aiohttp would wait for the rest of it
        self.close()

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio asks for one
        """Whether to stay, so that an answer can be sent."""
        return not self._is_idle and self._payload.is_eof() and self._ask_on()

    def _ask_on(self) -> bool:
        """Ask the client from now on whether it is still there; False when there is no way to."""
        if self._server.hang_ups is None or self.transport is None:
            return False
        if self._prober is None:
            self._prober = Prober(self, self.transport, self._fd)
        self._server.hang_ups.watch(self._fd, self.gone, end_of_input=False)
        return True

    def probe(self) -> bool:
        request, transport = self._current_request, self.transport
        if self._is_idle or transport is None:
            self.gone()  # it has all its answers
            return False
        if request is None:  # about to begin, or to end
            return False
        if request.writer.output_size:
            stream = request.get(STREAM)
            if stream is not None:
                stream.probe()
            return False
        if request.version < HttpVersion11:  # knows of no interim responses
            self.gone()
            return False
        transport.write(_CONTINUE)
        return True

    def gone(self) -> None:
        self.drop()

    @property
    def is_answering(self) -> bool:
        return self._current_request is None or self._current_request.writer.output_size > 0

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        is_last = self._close or (self._discards and not self._messages)
        if is_last and isinstance(resp, web.StreamResponse):
            resp.force_close()
        finished = await super().finish_response(request, resp, start_time)
        if self._in_head and not self._messages:
            self._expect_head()
        if (self._prober is not None or self._discards) and not self._messages:
            self.close()
        return finished

    def _pause_transport_reading(self) -> None:
        super()._pause_transport_reading()
        if self._server.hang_ups is not None and self.transport is not None:
            self._server.hang_ups.watch(self._fd, self._ended_unread, end_of_input=True)

    def _resume_transport_reading(self) -> None:
        if self._server.hang_ups is not None and self._prober is None:
            self._server.hang_ups.unwatch(self._fd)
        super()._resume_transport_reading()

    def _discard_input(self) -> None:
        """Read on, but keep no more: unread bytes would hide the end of input for ever once they
        fill the window. What has come whole is answered, and the connection closed behind it, as
        it may be (RFC 9112, 9.3.2).
        """
        self._discards = True
        self._in_head = False
        if self._messages and not self._payload.is_eof():
            self._messages.pop()
            self._payload.set_exception(web.RequestPayloadError("discarded"))
        self._payload = EMPTY_PAYLOAD
        self._resume_transport_reading()

    def _ended_unread(self) -> None:
        """The client's input has ended, behind bytes that are not read yet."""
        if not self._ask_on():
            self.drop()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_head_timer()
        self._stop_write_timer()
        if self._prober is not None:
            self._prober.stop()
        if self._server.hang_ups is not None:
            self._server.hang_ups.unwatch(self._fd)
        if self._address is not None:
            self._server.closed(self, self._address)
            self._address = None
        super().connection_lost(exc)

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what the parser refused, or a fault in aiohttp itself."""
        context = new_context(request, self._server.orchestrator.clock)
        if status < 500:
            return self._server.malformed(exc, context)
        if isinstance(exc, ConnectionError):  # the client's: there is nobody to be told
            raise exc
        self.log_exception("request failed outside its handler", exc_info=exc)
        if request.writer.output_size:
            raise ConnectionError("the response broke off")
        return self._server.refused(TidegateError("an internal error occurred"), context)

    def log_exception(self, *args: Any, **options: Any) -> None:
        """Say what failed, without messages and tracebacks, in which content may stand."""
        error = options.get("exc_info")
        if isinstance(error, web.RequestPayloadError):  # the client's; it has been told
            return
        reason = type(error).__name__ if isinstance(error, BaseException) else None
        service_log.error(str(args[0]).partition(":")[0], extra=fields(reason=reason))

    def log_debug(self, *args: Any, **options: Any) -> None:
        """Nothing: it is about clients that went away."""

    def _expect_head(self) -> None:
        if self._head_timer is None:
            timeout_s = self._server.orchestrator.settings.header_timeout_s
            if self.is_kept:
                timeout_s = min(timeout_s, KEPT_HEADER_TIMEOUT_S)
            self._head_timer = self._loop.call_later(timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_idle:  # else it is looked at once what runs is answered
            self.drop()

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _stop_write_timer(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None


def _is_for_operators(request: web.BaseRequest) -> bool:
    return is_open_path(request.path) or is_admin_call(request.method, request.path)
