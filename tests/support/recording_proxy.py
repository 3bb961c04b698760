"""A proxy that keeps what passed through it: each request, and the status of its answer."""

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from aiohttp import ClientSession, ClientTimeout, web

from tests.support.stack import LoopThread

_OF_THE_CONNECTION = {"host", "connection", "content-length", "transfer-encoding", "date", "server"}
_MAX_BODY = 64 * 2**20


class Exchange(NamedTuple):
    """A request and the status of its answer. ``body`` is the request's JSON, None without one."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    status: int


class RecordingProxy:
    """Forwards to the service at a URL while it is entered; ``exchanges`` in order of arrival."""

    def __init__(self, target: str) -> None:
        self.exchanges: list[Exchange] = []
        self.url = ""
        self._target = target
        self._loop = LoopThread()

    def __enter__(self) -> "RecordingProxy":
        self._loop.run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.run(self._stop())
        self._loop.close()

    async def _start(self) -> None:
        self._session = ClientSession(timeout=ClientTimeout(), auto_decompress=False)
        app = web.Application(client_max_size=_MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._forward)
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"

    async def _stop(self) -> None:
        await self._runner.cleanup()
        await self._session.close()

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        data = await request.read()
        headers = dict(_passed_on(request.headers))
        async with self._session.request(
            request.method, self._target + request.path_qs, data=data, headers=headers
        ) as answer:
            body = json.loads(data) if data else None
            self.exchanges.append(
                Exchange(request.method, request.path_qs, headers, body, answer.status)
            )
            kept = [
                (k, v) for k, v in answer.headers.items() if k.lower() not in _OF_THE_CONNECTION
            ]
            response = web.StreamResponse(status=answer.status, headers=dict(kept))
            await response.prepare(request)
            with suppress(ConnectionError):  # the client has what it wants
                async for piece in answer.content.iter_any():
                    await response.write(piece)
                await response.write_eof()
            return response


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    return {k: v for k, v in headers.items() if k.lower() not in _OF_THE_CONNECTION}
