"""Requests that the service sends itself: handled by the live routes' own handlers, whatever these
read and answer, without a connection."""

import asyncio
from collections.abc import Callable
from typing import NamedTuple, cast

from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_parser import RawRequestMessage
from aiohttp.http_writer import HttpVersion11
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from orchestrator.api.auth import Key
from orchestrator.api.http.context import CONTEXT, DIALECTS, ORCHESTRATOR, Context, new_context
from orchestrator.api.http.responses import error_response
from orchestrator.errors import TidegateError
from orchestrator.tasks.job import Job
from orchestrator.telemetry.log import fields, service_log


class Reply(NamedTuple):
    """A handler's answer, or the error that it raised."""

    status: int
    body: bytes
    error: TidegateError | None


class _Nobody(BaseProtocol):
    """Stand-in for a connection, for requests that have none."""

    ssl_context = peername = sockname = None


async def send(
    app: web.Application,
    path: str,
    body: bytes,
    *,
    key: Key,
    name: str,
    adapt: Callable[[Job], Job],
    refusal: TidegateError | None = None,
) -> Reply:
    """Have ``POST path`` answered as for a client of ``key``, under the correlation id ``name``.
    ``adapt`` changes the job that was read. A ``refusal`` is answered instead. Cancelling this
    counts as the client hanging up."""
    request = _request(app, path, body)
    match = await app.router.resolve(request)
    match.add_app(app)
    match.freeze()
    request._match_info = match
    orchestrator = app[ORCHESTRATOR]
    context: Context = new_context(request, orchestrator.clock, app[DIALECTS])
    context.correlation_id, context.key, context.adapt = name, key, adapt
    request[CONTEXT] = context
    try:
        if refusal is not None:
            raise refusal
        response = await match.handler(request)
        assert isinstance(response, web.Response) and isinstance(response.body, bytes)
        return Reply(response.status, response.body, None)
    except TidegateError as error:
        failure = error
    except Exception:
        service_log.exception("request handler failed", extra=fields(correlation_id=name))
        failure = TidegateError("an internal error occurred")
    response = error_response(failure, context, orchestrator.clock.now())
    assert isinstance(response.body, bytes)
    return Reply(response.status, response.body, failure)


def _request(app: web.Application, path: str, body: bytes) -> web.Request:
    loop = asyncio.get_running_loop()
    nobody = _Nobody(loop)
    headers = CIMultiDict({"Content-Type": "application/json", "Content-Length": str(len(body))})
    content = StreamReader(nobody, 2**16, loop=loop)
    content.feed_data(body)
    content.feed_eof()
    message = RawRequestMessage(
        "POST",
        path,
        HttpVersion11,
        CIMultiDictProxy(headers),
        tuple((name.encode(), value.encode()) for name, value in headers.items()),
        False,
        None,
        False,
        False,
        URL(path),
    )
    task = asyncio.current_task()
    assert task is not None
    return web.Request(
        message,
        content,
        cast(RequestHandler, nobody),
        cast(AbstractStreamWriter, None),  # nothing is written but a whole answer, which is taken
        task,
        loop,
        client_max_size=app._client_max_size,
    )
