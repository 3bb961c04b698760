"""Answers requests while the service reads its journal and cannot accept work yet.

Reading a large journal takes longer than a supervisor waits for the process's port. So the port is
opened first: the process is live, reports that it is starting, and refuses all other requests. The
service then takes over the same ``Port`` (``PortSite``). No connection is lost in between, and no
connection can delay the start (OR-26).
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
"""Most connections at a time. If clients used all open files, the journal could not be opened."""
CLOSE_S = 0.2
"""Longest wait in seconds for a response that is being written when the start fails."""
LEAVE_S = 0.5
"""Seconds in which a connection can still send a request after another server has the port: half of
the time that OR-26 allows."""
PROBES = {
    path: PreparedResponse(200 if path == "/health/live" else 503, b'{"status":"starting"}')
    for path in ("/health", "/health/live", "/health/ready", "/health/startup")
}
"""Responses of the health endpoints while the service starts."""
_MESSAGE = "the service is starting and reads its journal; retry in a moment"
_ERROR = {"code": NotReady.code, "type": NotReady.code, "message": _MESSAGE}
_REFUSED = PreparedResponse(503, json.dumps({"error": _ERROR}).encode())


@asynccontextmanager
async def saying_that_it_starts(host: str, port: int) -> AsyncIterator[Port]:
    """Listen, and answer that the service is starting until another server takes over the port. If
    none has at the end of the block, the port is closed. Raises ``OSError``."""
    starting = _Starting(_answer, access_log=None)
    listening = await Port.open(host, port, starting)
    listening.on_handed_over = starting.leave
    try:
        yield listening
    finally:
        if listening.server is starting:
            listening.close()
            await listening.wait_closed()
            await starting.shutdown(CLOSE_S)


class _Starting(web.Server):
    """A server for a few connections at a time. New connections replace the oldest."""

    is_over = False
    """Whether another server has the port."""

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        if self.is_over:
            self._loop.call_later(LEAVE_S, handler.force_close)
        for older in self.connections[:-MAX_CONNECTIONS]:
            older.force_close()

    def leave(self) -> None:
        """End all connections. Each may have sent a request that is not read yet."""
        self.is_over = True
        for connection in self.connections:
            self._loop.call_later(LEAVE_S, connection.force_close)


async def _answer(request: web.BaseRequest) -> web.Response:
    found = PROBES.get(request.path, _REFUSED) if request.method in ("GET", "HEAD") else _REFUSED
    return web.Response(
        body=found.body,
        status=found.status,
        content_type="application/json",
        # Another server takes over the port: a kept connection would be cut.
        headers={"Retry-After": "1", "Connection": "close"},
    )
