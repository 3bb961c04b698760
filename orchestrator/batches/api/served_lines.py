"""Serves lines of batches with the handlers of the live routes, as batch-class work and without a
connection."""

import asyncio
from dataclasses import replace
from typing import cast

import msgspec
from aiohttp import web
from aiohttp.abc import AbstractStreamWriter
from aiohttp.base_protocol import BaseProtocol
from aiohttp.http_parser import RawRequestMessage
from aiohttp.http_writer import HttpVersion11
from aiohttp.streams import StreamReader
from aiohttp.web_protocol import RequestHandler
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from orchestrator.api.auth import NOBODY
from orchestrator.api.http.context import AUTH, CONTEXT, DIALECTS, ORCHESTRATOR, new_context
from orchestrator.api.http.responses import error_response
from orchestrator.batches.records import BatchLine, LineOutcome, LineResult, StoredBatch
from orchestrator.batches.service import Batches
from orchestrator.clock import instant
from orchestrator.errors import (
    DeadlineExceeded,
    InstanceLost,
    InvalidRequest,
    TidegateError,
    Unauthenticated,
    Unavailable,
)
from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.job import Job, OnDisconnect, Priority
from orchestrator.telemetry.log import fields, service_log


class _Nobody(BaseProtocol):
    """Stands in for the connection of a request without one."""

    ssl_context = peername = sockname = None


async def _request(app: web.Application, path: str, body: bytes) -> web.Request:
    """``POST path`` with its route, as if it had come through a connection."""
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
    request = web.Request(
        message,
        content,
        cast(RequestHandler, nobody),
        cast(AbstractStreamWriter, None),  # unused: the handler returns a whole response
        task,
        loop,
        client_max_size=app._client_max_size,
    )
    match = request._match_info = await app.router.resolve(request)
    match.add_app(app)
    match.freeze()
    return request


BATCHES: web.AppKey[Batches | None] = web.AppKey("batches")

_UNSERVED = {
    LineOutcome.EXPIRED: (
        "batch_expired",
        "This request could not be executed before the completion window expired.",
    ),
    LineOutcome.CANCELLED: (
        "batch_cancelled",
        "This request was not executed: its batch was cancelled.",
    ),
}


def batches_of(request: web.Request) -> Batches:
    """The service's batches. Raises ``InvalidRequest`` if it has none."""
    batches = request.app[BATCHES]
    if batches is None:
        raise InvalidRequest(
            "files and batches need a journal, and this service has none: the operator can set "
            "TIDEGATE_JOURNAL__PATH"
        )
    return batches


def owner_of(request: web.Request) -> str:
    return request[CONTEXT].key.fingerprint


class _Modes(msgspec.Struct, frozen=True):
    """The field that lines must not set, because a line has one whole answer."""

    stream: bool | None = None


_modes = msgspec.json.Decoder(_Modes)


class BatchLines:
    """The ``LineServer`` of an application."""

    def __init__(self, app: web.Application, batches: Batches) -> None:
        self._app = app
        self._batches = batches

    def entry(
        self, batch: StoredBatch, line: BatchLine, kind: LineOutcome, answer: LineResult | None
    ) -> bytes:
        told: dict[str, object] = {
            "id": f"batch_req_{batch.id.removeprefix('batch_')}_{line.number}",
            "custom_id": line.custom_id,
            "response": None,
            "error": None,
        }
        if kind in _UNSERVED:
            code, message = _UNSERVED[kind]
            told["error"] = {"code": code, "message": message}
        else:
            assert answer is not None
            told["response"] = {
                "status_code": answer.status,
                "request_id": answer.request_id,
                "body": msgspec.Raw(answer.body),
            }
        return msgspec.json.encode(told) + b"\n"

    def most_at_once(self, owner: str) -> int:
        """Half of the requests that the key may have. The rest is for its other requests."""
        orchestrator = self._app[ORCHESTRATOR]
        limit = orchestrator.limits.concurrent_of(owner)
        return max(1, limit // 2) if limit else self._batches.config.window

    async def serve(self, batch: StoredBatch, line: BatchLine, due_at: float) -> LineResult:
        """Cancellation counts as a hang-up."""
        app, name = self._app, f"{batch.id}/{line.number}"
        orchestrator, key = app[ORCHESTRATOR], app[AUTH].key_with(batch.owner)
        is_own = False

        def adapt(job: Job) -> Job:
            nonlocal is_own
            is_own = not job.deadline.is_default and job.deadline.at < due_at
            left_s, now = due_at - orchestrator.clock.now(), instant(orchestrator.clock)
            whole = Deadline(due_at, round((now.unix + left_s) * 1000))
            return replace(
                job,
                deadline=job.deadline if is_own else whole,
                priority=Priority.BATCH,
                # No client returns for a line that its batch has dropped.
                on_disconnect=OnDisconnect.CANCEL,
                keep=False,
            )

        request = await _request(app, batch.endpoint, line.body)
        context = request[CONTEXT] = new_context(request, orchestrator.clock, app[DIALECTS])
        context.correlation_id, context.key, context.adapt = name, key or NOBODY, adapt
        error: TidegateError | None = None
        try:
            if key is None:
                raise Unauthenticated("the API key that created this batch has been removed")
            _require_whole(line.body)
            answer = await request.match_info.handler(request)
        except TidegateError as failure:
            error = failure
        except Exception:
            service_log.exception("request handler failed", extra=fields(correlation_id=name))
            error = TidegateError("an internal error occurred")
        if error is not None:
            answer = error_response(error, context, orchestrator.clock.now())
        assert isinstance(answer, web.Response) and isinstance(answer.body, bytes)
        kind = LineOutcome.SUCCEEDED if error is None else LineOutcome.ERRORED
        if isinstance(error, DeadlineExceeded) and not is_own:
            kind = LineOutcome.EXPIRED
        retry_after_s = None
        if isinstance(error, Unavailable) and error.retryable:
            retry_after_s = error.retry_after_ms / 1000
        is_loss = isinstance(error, InstanceLost)
        return LineResult(kind, answer.status, name, answer.body, retry_after_s, is_loss)


def _require_whole(body: bytes) -> None:
    """Raise ``InvalidRequest`` for a line that does not ask for exactly one whole answer."""
    try:
        modes = _modes.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return  # the route reports the error
    if modes.stream:
        raise InvalidRequest(
            "stream is not supported in a batch: each line has one whole answer", field="stream"
        )
