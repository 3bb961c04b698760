"""The server: bounds connections, and leaves nothing to be answered by aiohttp itself."""

from collections.abc import Awaitable, Callable

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from orchestrator.api.auth import is_admin_call, is_open_path
from orchestrator.api.config import CONFIG, ApiConfig
from orchestrator.api.http.browsers import Browsers
from orchestrator.api.http.connection import Connection
from orchestrator.api.http.connection_limit import ConnectionLimit
from orchestrator.api.http.context import DIALECTS, HTTP_ERRORS, ORCHESTRATOR
from orchestrator.api.http.hang_ups import CAN_WATCH, HangUps
from orchestrator.api.http.losses import Losses
from orchestrator.api.http.unhandled import Unhandled
from orchestrator.errors import InvalidRequest, NoCapacity

Handle = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_EXPECTED = "100-continue"


class Runner(web.AppRunner):
    """An application's runner whose connections are ``Connection`` objects."""

    async def _make_server(self) -> web.Server:
        orchestrator = self.app[ORCHESTRATOR]
        unhandled = Unhandled(orchestrator, self.app[DIALECTS], self.app[HTTP_ERRORS])
        return _Server(await super()._make_server(), self.app[CONFIG], unhandled)


class _Server(web.Server):
    """Makes connections. ``made`` is aiohttp's own server, for the application."""

    def __init__(self, made: web.Server, config: ApiConfig, unhandled: Unhandled) -> None:
        super().__init__(
            self._outermost(made.request_handler),
            request_factory=made.request_factory,
            handler_cancellation=made.handler_cancellation,
            **made._kwargs,
        )
        self._config = config.http
        self._unhandled = unhandled
        self._browsers = Browsers(config.http)
        self._hang_ups = HangUps(self._loop) if CAN_WATCH else None
        self._losses = Losses(self._loop)
        self._limit = ConnectionLimit(config.http.max_connections)

    def __call__(self) -> RequestHandler:
        return Connection(
            self,
            self._config,
            self._limit,
            self._unhandled,
            self._hang_ups,
            self._losses,
            loop=self._loop,
            **self._kwargs,
        )

    async def shutdown(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 - aiohttp's
        await super().shutdown(timeout)
        if self._hang_ups is not None:
            self._hang_ups.close()

    def _outermost(self, handle: Handle) -> Handle:
        """``handle``, preceded by what aiohttp would refuse before any middleware, such as an
        ``Expect``."""

        async def outermost(request: web.BaseRequest) -> web.StreamResponse:
            connection, refused = request.protocol, self._unhandled.refused
            assert isinstance(connection, Connection)
            if connection.is_reserved and not _is_for_operators(request):
                no_room = NoCapacity("too many connections are open", retry_after_ms=1000.0)
                response = refused(request, no_room)
                response.headers.update(self._browsers.headers(request.headers))
                return response
            if request.headers.get("Expect", _EXPECTED).lower() != _EXPECTED:
                # aiohttp's own answer repeats the header, and breaks off where it is not text.
                wrong = InvalidRequest("Expect must be 100-continue", field="Expect")
                return refused(request, wrong)
            try:
                return await handle(request)
            except web.HTTPException as error:
                message = f"the request cannot be served: {error.reason}"
                return refused(request, InvalidRequest(message))

        return outermost


def _is_for_operators(request: web.BaseRequest) -> bool:
    return is_open_path(request.path) or is_admin_call(request.method, request.path)
