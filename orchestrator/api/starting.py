"""Answers while the service reads its journal and cannot take requests yet.

Reading a large journal takes longer than a supervisor waits for the process's port. So the
port listens first: the process is live, says that it is starting, and refuses everything else for
the moment. The service then serves the same ``Port`` (``PortSite``): no connection is lost between
the two, and none can hold the start up (OR-26).
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from orchestrator.api.http.accepting import Port
from orchestrator.errors import NotReady
from orchestrator.health import PreparedResponse

MAX_CONNECTIONS = 64
"""Most connections at a time: with every open file taken by clients no journal could be opened."""
CLOSE_S = 0.2
"""Longest wait for an answer that is being written when the start fails, in seconds."""
LEAVE_S = 0.5
"""Time in which a connection can still ask once another server has the port, in seconds: half of
what OR-26 allows."""
_RETRY_AFTER_S = "1"
_STARTING = b'{"status":"starting"}'
PROBES = {
    path: PreparedResponse(200 if path == "/health/live" else 503, _STARTING)
    for path in ("/health", "/health/live", "/health/ready", "/health/startup")
}
"""Answers of the health endpoints while the service starts."""
_REFUSED = json.dumps(
    {
        "error": {
            "code": NotReady.code,
            "type": NotReady.code,
            "message": "the service is starting and reads its journal: send it again in a moment",
        }
    }
).encode()


@asynccontextmanager
async def saying_that_it_starts(
    host: str, port: int, *, is_shared: bool = False
) -> AsyncIterator[Port]:
    """Listen, and say that the service starts until another server serves the port. A port without
    another server at the end of the body is closed. Raises ``OSError``."""
    starting = _Starting(_answer, access_log=None)
    listening = await Port.open(host, port, starting, is_shared=is_shared)
    listening.on_handed_over = starting.leave
    try:
        yield listening
    finally:
        if listening.server is starting:
            listening.close()
            await listening.wait_closed()
            await starting.shutdown(CLOSE_S)


class _Starting(web.Server):
    """A server for few connections at a time: the oldest are closed for new ones."""

    is_over = False
    """Whether another server has the port."""

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if self.is_over:
            self._close_soon(handler)
        for older in self.connections[:-MAX_CONNECTIONS]:
            older.force_close()

    def leave(self) -> None:
        """End all connections, each of which may have asked something that is not read yet."""
        self.is_over = True
        for connection in self.connections:
            self._close_soon(connection)

    def _close_soon(self, connection: RequestHandler) -> None:
        self._loop.call_later(LEAVE_S, connection.force_close)


async def _answer(request: web.BaseRequest) -> web.Response:
    found = PROBES.get(request.path)
    is_known = found is not None and request.method in ("GET", "HEAD")
    return web.Response(
        body=found.body if found is not None and is_known else _REFUSED,
        status=found.status if found is not None and is_known else 503,
        content_type="application/json",
        # Another server takes the port over: a connection that is kept would be cut.
        headers={"Retry-After": _RETRY_AFTER_S, "Connection": "close"},
    )
