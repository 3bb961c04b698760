"""Answers while the service cannot take requests yet, because its journal is read and checked.

Reading a large journal takes longer than whoever started the process waits for its port. So the
port listens first, as does the health port, if there is one: the process is live, says that it is
starting, and refuses everything else for the moment.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from orchestrator.api.http.accepting import ACCEPTS_PER_PASS, widen_backlog
from orchestrator.errors import NotReady

MAX_CONNECTIONS = 64
"""Most connections at a time: with every open file taken by clients no journal could be opened."""
_RETRY_AFTER_S = "1"
_STARTING = b'{"status":"starting"}'
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
async def saying_that_it_starts(host: str, port: int, health_port: int = 0) -> AsyncIterator[None]:
    """Listen within the body. Raises ``OSError`` where that is impossible at ``port``; a port of 0,
    which nobody could know, is not listened on."""
    runner = web.ServerRunner(_Starting(_answer, access_log=None), shutdown_timeout=0.0)
    await runner.setup()
    try:
        if port:
            await _listen(runner, host, port)
        if health_port > 0:
            with suppress(OSError):  # the service's own health port reports why it cannot listen
                await _listen(runner, host, health_port)
        yield
    finally:
        await runner.cleanup()


async def _listen(runner: web.ServerRunner, host: str, port: int) -> None:
    site = web.TCPSite(runner, host, port, backlog=ACCEPTS_PER_PASS)
    await site.start()
    widen_backlog(site._server)


class _Starting(web.Server):
    """A server for few connections at a time: the oldest are closed for new ones."""

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        for older in self.connections[:-MAX_CONNECTIONS]:
            older.force_close()


async def _answer(request: web.BaseRequest) -> web.Response:
    if request.path == "/health/live" and request.method in ("GET", "HEAD"):
        return web.Response(body=_STARTING, content_type="application/json")
    is_probe = request.path.startswith("/health")
    return web.Response(
        body=_STARTING if is_probe else _REFUSED,
        status=503,
        content_type="application/json",
        # Another server takes the port over: a connection that is kept would be cut.
        headers={"Retry-After": _RETRY_AFTER_S, "Connection": "close"},
    )
