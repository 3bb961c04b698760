"""``GET /openapi.json``: OpenAPI 3.1 of every route, derived from the types of request bodies.

The document describes requests as far as the decoder checks them. Checks beyond a type (a number's
range, the model's context) answer 400. Responses and errors have the dialects' formats. Their SDKs
describe these in full, so the document does not. A GET route that is not in ``OPERATIONS`` answers
with JSON. Any other route that is missing there fails a test.
"""

import asyncio
import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
from aiohttp import web

from orchestrator.api.anthropic.types import CountTokensRequest, MessagesRequest
from orchestrator.api.config import CONFIG
from orchestrator.api.http.context import DIALECTS, dialect_of
from orchestrator.api.http.decode import with_unknown_fields
from orchestrator.api.native.quotes import QuoteRequest
from orchestrator.api.native.types import TaskRequest
from orchestrator.api.openai.tokens import DetokenizeRequest, TokenizeRequest
from orchestrator.api.openai.types import ChatRequest, CompletionRequest
from orchestrator.api.openapi.operation import EVENTS, JSON, PLAIN, TEXT, Operation
from orchestrator.api.operator.types import (
    DrainRequest,
    RegisterRequest,
    ReloadRequest,
    SwapRequest,
)
from orchestrator.errors import TidegateError

_BOTH = (JSON, EVENTS)
_PROBE = Operation(statuses=(200, 503))
_CACHED = Operation(statuses=(200, 304))
_ACCEPTED = Operation(statuses=(202,))
_DRAIN = Operation(DrainRequest, statuses=(202,), body_is_optional=True)

OPERATIONS: Mapping[str, Operation] = {  # by method and the router's path
    "POST /v1/chat/completions": Operation(ChatRequest, _BOTH),
    "POST /v1/completions": Operation(CompletionRequest, _BOTH),
    **{
        f"POST {path}/{{task_id}}/cancel": _ACCEPTED
        for path in ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v2/tasks")
    },
    "DELETE /v2/tasks/{task_id}": _ACCEPTED,
    **{f"POST {at}/tokenize": Operation(TokenizeRequest) for at in ("", "/v1")},
    **{f"POST {at}/detokenize": Operation(DetokenizeRequest) for at in ("", "/v1")},
    "POST /v1/messages": Operation(MessagesRequest, _BOTH),
    "POST /v1/messages/count_tokens": Operation(CountTokensRequest),
    "POST /v2/tasks": Operation(TaskRequest, statuses=(202,)),
    "POST /v2/quote": Operation(QuoteRequest),
    "GET /v2/tasks": Operation(parameters=("status", "limit")),
    "GET /v2/tasks/{task_id}/events": Operation(gives=(EVENTS,)),
    "POST /v2/instances": Operation(RegisterRequest, statuses=(200, 201)),
    "DELETE /v2/instances/{address}": PLAIN,
    "POST /v2/instances/{address}/drain": _DRAIN,
    "POST /v2/instances/{address}/undrain": PLAIN,
    **{
        route.format(kind=kind): operation
        for kind in ("models", "engines")
        for route, operation in (
            ("GET /v2/catalog/{kind}", _CACHED._replace(parameters=("limit", "cursor"))),
            ("GET /v2/catalog/{kind}/{{id}}", _CACHED),
            ("GET /v2/catalog/{kind}/{{id}}/state", _CACHED),
            ("POST /v2/catalog/{kind}/{{id}}/verify", _ACCEPTED),
        )
    },
    "POST /v2/instances/{address}/swap": Operation(SwapRequest, statuses=(200, 202)),
    "POST /v2/instances/{address}/reload": Operation(
        ReloadRequest, statuses=(200, 202), body_is_optional=True
    ),
    "POST /admin/drain": _DRAIN,
    "POST /admin/undrain": PLAIN,
    "POST /admin/reload": PLAIN,
    "GET /v2/overview/events": Operation(gives=(EVENTS,)),
    **{f"GET /health{part}": _PROBE for part in ("", "/live", "/ready", "/startup")},
    "GET /metrics": Operation(gives=(TEXT,)),
    "GET /metrics/vllm": Operation(gives=(TEXT,)),
}


class Document:
    """The encoded document, made only once: two threads would create different types."""

    def __init__(self) -> None:
        self.body = b""
        self.making = asyncio.Lock()


DOCUMENT = web.AppKey("openapi", Document)
EDGES = web.AppKey("edges", tuple[object, ...])
"""Modules with routes: of the dialects and of the optional rooms."""
_REF = "#/components/schemas/{name}"
_METHODS_TOLD = ("GET", "POST", "DELETE")
_NO_WORD = re.compile(r"\W+")
_IN_PATH = re.compile(r"{(\w+)}")


class MissingOperation(LookupError):
    """A route that ``OPERATIONS`` does not describe."""


async def openapi(request: web.Request) -> web.Response:
    """Show the OpenAPI document of this service."""
    kept = request.app[DOCUMENT]
    async with kept.making:
        if not kept.body:
            kept.body = msgspec.json.encode(await asyncio.to_thread(document_of, request.app))
    return web.Response(body=kept.body, content_type=JSON)


def routes() -> list[web.RouteDef]:
    return [web.get("/openapi.json", openapi)]


def document_of(app: web.Application) -> dict[str, Any]:
    """The document of all routes of ``app``. Raises ``MissingOperation``."""
    found = [
        (route.method, route.resource.canonical, route.handler)
        for route in app.router.routes()
        if route.resource is not None and route.method in _METHODS_TOLD
    ]
    known = operations_of(app)
    for method, path, _ in found:
        if method != "GET" and f"{method} {path}" not in known:
            raise MissingOperation(
                f"{method} {path} has no description: add it to OPERATIONS of its module"
            )
    operations = {
        (method, path): _as_read(known.get(f"{method} {path}", PLAIN), path, app)
        for method, path, _ in found
    }
    bodies = list({one.body: None for one in operations.values() if one.body is not None})
    described, components = msgspec.json.schema_components(bodies, ref_template=_REF)
    refs = dict(zip(bodies, described, strict=True))
    statuses = sorted({kind.status for kind in _kinds(TidegateError)} | {500})
    paths: dict[str, dict[str, Any]] = {}
    error = {"description": "An error", "content": {JSON: {"schema": {"type": "object"}}}}
    for method, path, handler in found:
        operation = operations[method, path]
        told = _told(operation, path, refs)
        told["summary"] = (handler.__doc__ or "").strip().partition("\n")[0]
        told["operationId"] = method.lower() + _NO_WORD.sub("_", path)
        told["responses"] |= {str(status): error for status in statuses}
        told["responses"] |= _fine(operation)
        paths.setdefault(path, {})[method.lower()] = told
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Tidegate",
            "version": "2",
            "description": "Deadline-keeping inference: OpenAI's, Anthropic's and an API of "
            "its own over the same tasks.",
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"key": []}],
    }


def operations_of(app: web.Application) -> Mapping[str, Operation]:
    """The operations of the core, dialects and rooms."""
    known = dict(OPERATIONS)
    for edge in app[EDGES]:
        known |= getattr(edge, "OPERATIONS", {})
    return known


def _as_read(operation: Operation, path: str, app: web.Application) -> Operation:
    """The operation. Its body allows unknown fields if the path's dialect ignores them."""
    if operation.body is None:
        return operation
    is_tolerant = dialect_of(path, app[DIALECTS]).is_tolerant and not app[CONFIG].http.strict_fields
    forbidden = False if is_tolerant else None
    body = with_unknown_fields(operation.body, forbidden=forbidden, is_told=True)
    return operation._replace(body=body)


def _told(operation: Operation, path: str, refs: Mapping[type, Any]) -> dict[str, Any]:
    text = {"schema": {"type": "string"}}
    told: dict[str, Any] = {"responses": {}}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _IN_PATH.findall(path)
    ]
    parameters += [{"name": name, "in": "query", **text} for name in operation.parameters]
    if operation.body is not None:
        parameters.append(
            {"name": "X-Timeout-Ms", "in": "header", "schema": {"type": "integer", "minimum": 1}}
        )
        told["requestBody"] = {
            "required": not operation.body_is_optional,
            "content": {JSON: {"schema": refs[operation.body]}},
        }
    if operation.takes is not None:
        content = {"multipart/form-data": {"schema": operation.takes}}
        told["requestBody"] = {"required": True, "content": content}
    if parameters:
        told["parameters"] = parameters
    return told


def _fine(operation: Operation) -> dict[str, Any]:
    content = {
        kind: {"schema": {"type": "object" if kind == JSON else "string"}}
        for kind in operation.gives
    }
    return {
        str(status): {"description": "The answer", "content": content}
        for status in operation.statuses
    }


def _kinds(kind: type[TidegateError]) -> Iterable[type[TidegateError]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from _kinds(narrower)
