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

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from aiohttp.web_protocol import RequestHandler

from orchestrator.api.browsers import Browsers
from orchestrator.api.context import (
    CORRELATION_HEADER,
    GATEWAY,
    Context,
    error_response,
    new_context,
)
from orchestrator.auth import is_admin_call, is_open_path
from orchestrator.errors import InvalidRequest, NoCapacity, TidegateError
from orchestrator.gateway import Gateway
from orchestrator.log import fields, service_log

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
        return _Server(self.app[GATEWAY], await super()._make_server())


class _Server(web.Server):
    """Makes connections. ``made`` is aiohttp's own, for the application."""

    def __init__(self, gateway: Gateway, made: web.Server) -> None:
        super().__init__(
            self._outermost(made.request_handler),
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            **made._kwargs,
        )
        self.gateway = gateway
        self._browsers = Browsers(gateway.settings)
        self._most = gateway.settings.max_connections
        self._by_address: Counter[str] = Counter()
        self._kept: dict[Connection, None] = {}
        """Connections beyond those for everybody, the longest silent first."""
        self._malformed = 0
        self._log_at = 0.0

    def __call__(self) -> RequestHandler:
        return Connection(self, loop=self._loop, **self._kwargs)

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
        self.gateway.metrics.http_errors.labels(error.status, error.code).inc()
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
                error = NoCapacity("too many connections are open", retry_after_ms=1000.0)
                response = self.refused(error, new_context(request, self.gateway.clock))
                response.headers.update(self._browsers.headers(request.headers))
                return response
            try:
                return await handle(request)
            except web.HTTPException as error:
                message = f"the request cannot be served: {error.reason}"
                return self.refused(
                    InvalidRequest(message), new_context(request, self.gateway.clock)
                )

        return outermost


class Connection(RequestHandler):
    """One client's. Closed when the head of a request takes too long to come, or when nothing of
    what is sent is read for as long as an idle connection may stand.
    """

    def __init__(self, server: _Server, **options: Any) -> None:
        super().__init__(server, **options)
        self._server = server
        self._address: str | None = None
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self.is_kept = False
        """One of the last few: for probes and operators only."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        peer = transport.get_extra_info("peername")
        self._address = str(peer[0]) if peer else ""
        self.is_kept = not self._server.opened(self, self._address)
        if self.is_kept:
            self._expect_head()

    @property
    def is_serving(self) -> bool:
        """Whether a request is under way."""
        return self._current_request is not None

    def drop(self) -> None:
        """Close at once: what is still to be sent may never be read."""
        transport = self.transport
        self.force_close()
        if transport is not None:
            transport.abort()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._write_timer is None:
            timeout_s = self._server.gateway.settings.idle_timeout_s
            self._write_timer = self._loop.call_later(timeout_s, self.drop)

    def resume_writing(self) -> None:
        self._stop_write_timer()
        super().resume_writing()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.is_kept:
            self._server.heard(self)
        if self._waiter is None or self._waiter.done():  # a request has come
            self._stop_head_timer()
        else:
            self._expect_head()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop_head_timer()
        self._stop_write_timer()
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
        context = new_context(request, self._server.gateway.clock)
        if status < 500:
            return self._server.malformed(exc, context)
        self.log_exception("request failed outside its handler", exc_info=exc)
        if request.writer.output_size:
            raise ConnectionError("the response broke off")
        return self._server.refused(TidegateError("an internal error occurred"), context)

    def log_exception(self, *args: Any, **options: Any) -> None:
        """Say what failed, without messages and tracebacks, in which content may stand."""
        error = options.get("exc_info")
        reason = type(error).__name__ if isinstance(error, BaseException) else None
        service_log.error(str(args[0]).partition(":")[0], extra=fields(reason=reason))

    def log_debug(self, *args: Any, **options: Any) -> None:
        """Nothing: it is about clients that went away."""

    def _expect_head(self) -> None:
        if self._head_timer is None:
            timeout_s = self._server.gateway.settings.header_timeout_s
            if self.is_kept:
                timeout_s = min(timeout_s, KEPT_HEADER_TIMEOUT_S)
            self._head_timer = self._loop.call_later(timeout_s, self.drop)

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
