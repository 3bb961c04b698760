"""An orchestrator that a test can make to misbehave: it speaks the native API from a script."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from tests.support.sites import running_app

Json = dict[str, Any]


def sse(event_id: int, event: str, data: Json) -> bytes:
    return f"id: {event_id}\nevent: {event}\ndata: {json.dumps(data)}\n\n".encode()


def token(event_id: int, text: str) -> bytes:
    return sse(event_id, "token", {"text": text, "token_ids": [event_id], "index": event_id - 2})


def end(event_id: int, tokens: int) -> bytes:
    usage = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": tokens + 3}
    budget = {"queue_ms": 0.1, "route_ms": 0.1, "prefill_ms": 1, "decode_ms": 5, "left_ms": 900}
    body = {"outcome": "met", "finish_reason": "stop", "usage": usage, "budget": budget}
    return sse(event_id, "end", body)


CUT = None
"""In a script: drop the connection here."""

FORGOTTEN = "forgotten"
"""A script of its own: the service does not know the task any more."""

HANG = "hang"
"""In a script: send nothing more and keep the connection open."""


class FakeOrchestrator:
    """``connections`` is what each connection to the event stream gets, in order of arrival."""

    def __init__(self, *connections: list[bytes | str | None]) -> None:
        self.connections = list(connections)
        self.last_event_ids: list[str | None] = []
        self.submitted: list[Json] = []
        self.cancelled: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.refusal: tuple[int, Json | str, dict[str, str]] | None = None
        self.base_url = ""
        self.submission_arrived = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    @asynccontextmanager
    async def serve(self) -> AsyncIterator["FakeOrchestrator"]:
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v2/tasks", self._submit)
        app.router.add_get("/v2/tasks/{id}", self._status)
        app.router.add_get("/v2/tasks/{id}/events", self._events)
        app.router.add_post("/v2/tasks/{id}/cancel", self._cancel)
        async with running_app(app) as port:
            self.base_url = f"http://127.0.0.1:{port}"
            yield self

    async def _models(self, request: web.Request) -> web.Response:
        self.headers.append(dict(request.headers))
        if self.refusal:
            return self._refuse()
        return web.json_response({"object": "list", "data": [{"id": "demo", "object": "model"}]})

    async def _submit(self, request: web.Request) -> web.Response:
        self.submitted.append(await request.json())
        self.headers.append(dict(request.headers))
        self.submission_arrived.set()
        await self.may_answer.wait()
        if self.refusal:
            return self._refuse()
        body = {
            "task_id": "t1",
            "status": "queued",
            "queue_position": 0,
            "predicted_start_ms": 1.5,
            "events_url": "/v2/tasks/t1/events",
            "correlation_id": "c1",
        }
        return web.json_response(body, status=202)

    async def _status(self, request: web.Request) -> web.Response:
        if request.match_info["id"] != "t1":
            return web.json_response(
                {"error": {"code": "not_found", "message": "no such task"}}, status=404
            )
        return web.json_response({"task_id": "t1", "text": "Once", "status": "running"})

    async def _events(self, request: web.Request) -> web.StreamResponse:
        self.last_event_ids.append(request.headers.get("Last-Event-ID"))
        script = self.connections.pop(0)
        if script and script[0] == "refuse":
            return self._refuse()
        if script and script[0] == FORGOTTEN:
            error = {"code": "not_found", "message": "no such task"}
            return web.json_response({"error": error}, status=404)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        for step in script:
            if step is CUT:
                assert request.transport is not None
                request.transport.abort()
                return response
            if step == HANG:
                await asyncio.Event().wait()  # ends by cancellation, when the client leaves
            assert isinstance(step, bytes)
            await response.write(step)
        return response

    async def _cancel(self, request: web.Request) -> web.Response:
        self.cancelled.append(request.match_info["id"])
        return web.json_response({"task_id": request.match_info["id"]}, status=202)

    def _refuse(self) -> web.Response:
        assert self.refusal is not None
        status, body, headers = self.refusal
        if isinstance(body, str):
            return web.Response(status=status, text=body, headers=headers)
        return web.json_response(body, status=status, headers=headers)
