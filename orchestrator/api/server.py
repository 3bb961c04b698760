"""The web application: routes, and the middleware that every request passes through."""

import asyncio
import difflib
import itertools
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware
from multidict import CIMultiDict

from catalog.paths import state_dir
from orchestrator.api.auth import NOBODY, Authenticator, is_admin_call, is_open_path, is_page
from orchestrator.api.config import CONFIG, ApiConfig
from orchestrator.api.dialects import SERVED
from orchestrator.api.http.accepting import KeyShares
from orchestrator.api.http.body import (
    ALL_BODIES_BYTES,
    BODIES,
    LARGE_BODIES,
    BodyBudget,
    LargeBodies,
)
from orchestrator.api.http.browsers import BROWSERS, Browsers
from orchestrator.api.http.connection import ConnectionRunner
from orchestrator.api.http.context import (
    AUTH,
    CONTEXT,
    DIALECTS,
    HEALTH,
    HTTP_ERRORS,
    HTTP_RESPONSES,
    ORCHESTRATOR,
    TRACE,
    Context,
    new_context,
    read_correlation_id,
)
from orchestrator.api.http.deadlines import read_deadline, stated_deadline
from orchestrator.api.http.finding import ELSEWHERE, Elsewhere
from orchestrator.api.http.ignored import IGNORED_FIELDS, IgnoredFields
from orchestrator.api.http.responses import error_response, name_response, rate_limit_headers
from orchestrator.api.native import routes as native
from orchestrator.api.operator import (
    admin,
    capabilities,
    catalog,
    instances,
    overview,
    probes,
)
from orchestrator.api.operator.admin import Control
from orchestrator.api.operator.neighbours import VLLM, VLLM_PREFIX
from orchestrator.errors import (
    InvalidRequest,
    MethodNotAllowed,
    NotFound,
    TidegateError,
    Unauthenticated,
)
from orchestrator.health import HealthBoard
from orchestrator.instances.discovery import DiscoverySync
from orchestrator.service import Orchestrator
from orchestrator.tasks.submissions import Submissions
from orchestrator.telemetry.log import fields, service_log
from orchestrator.telemetry.trace_context import read_traceparent
from protocol import excerpt

if TYPE_CHECKING:
    from orchestrator.tasks.spans import Tracing

KEY_SHARES = web.AppKey("key_shares", KeyShares)

ALERTED_STATUSES = (200, 503, 529)
"""Statuses with counters that start at 0: a rate misses the event that creates a series."""
_INSTEAD = {
    "/v1/conversations": "continue with previous_response_id of /v1/responses",
    "/embeddings": "ask a server of embeddings, such as vLLM's, for vectors",
    "/v1/messages/batches": "send the requests as a file, to /v1/files and /v1/batches",
    "/input_items": "what a response was made from is what was sent; keep it",
    **dict.fromkeys(
        ("/v1/responses/input_tokens", "/tokenize"),
        "/v1/messages/count_tokens counts the tokens of messages",
    ),
    "/v1/responses/compact": "send a shorter conversation as input",
    **dict.fromkeys(("/api/chat", "/api/generate"), "send it to /v1/chat/completions"),
    "/api/tags": "models are at /v1/models",
}
"""Alternatives to unsupported routes that clients know, by part of their path."""
_PATH_CHARS, _MOST_PARTS = 128, 8
"""How much of an unknown path is compared with the existing paths: characters and segments."""
_ALIKE = 0.8
"""Least similarity (``difflib``) of a suggested path. /models and /v1/models have 0.82."""
READ_BUFFER_BYTES = 2**14
"""Reading from a connection pauses while twice this many bytes wait for its handler. One read of
the socket may add up to 256 KiB. aiohttp's default of 256 KiB would be 3 GB for all connections."""


def build_runner(
    orchestrator: Orchestrator,
    health: HealthBoard,
    discovery: DiscoverySync,
    config: ApiConfig,
    control: Control | None = None,
    *,
    shutdown_timeout_s: float,
) -> web.AppRunner:
    """The application for an orchestrator, ready to be served. The caller starts and stops the
    orchestrator. Without ``control``, the application cannot operate the process."""
    middlewares: list[Middleware] = [_edge]
    if orchestrator.tracing is not None:
        middlewares.insert(0, _tracing_middleware(orchestrator.tracing))
    app = web.Application(middlewares=middlewares, client_max_size=config.http.max_body_bytes)
    app[CONFIG] = config
    app[HEALTH] = health
    app[instances.DISCOVERY] = discovery
    app[ORCHESTRATOR] = orchestrator
    app[DIALECTS] = tuple(served.conventions for served in SERVED)
    app[HTTP_ERRORS] = orchestrator.metrics.counter(
        "http_errors", "responses", "Error responses", "status", "code"
    )
    app[HTTP_RESPONSES] = orchestrator.metrics.counter(
        "http_responses", "responses", "Responses, except for health and metrics", "status"
    )
    orchestrator.metrics.watch(orchestrator, VLLM, VLLM_PREFIX)
    for status in ALERTED_STATUSES:
        app[HTTP_RESPONSES].labels(status)
    app[IGNORED_FIELDS] = IgnoredFields(orchestrator.metrics)
    app[BODIES] = BodyBudget(max(ALL_BODIES_BYTES, config.http.max_body_bytes))
    app[AUTH] = Authenticator(config.keys)
    app[BROWSERS] = Browsers(config.http)
    app[KEY_SHARES] = KeyShares(config.http.max_connections)
    app[LARGE_BODIES] = LargeBodies()
    app[catalog.VERIFICATIONS] = catalog.Verifications(state_dir)
    app[ELSEWHERE] = Elsewhere()
    app[overview.OVERVIEW] = overview.Overview(orchestrator, health)
    app[native.SUBMISSIONS] = Submissions(orchestrator.store)
    if control is not None:
        app[admin.CONTROL] = control
        app.add_routes(admin.routes())
        control.follow_keys(app[AUTH])
    for served in SERVED:
        app.add_routes(served.routes)
    for room in orchestrator.rooms:
        room.attach(app)
    for operating in (instances, capabilities, catalog, overview, probes):
        app.add_routes(operating.routes())
    app.on_response_prepare.append(_name_response)
    app.on_shutdown.append(overview.close)
    app.on_cleanup.append(_close)
    return ConnectionRunner(
        app,
        keepalive_timeout=config.http.idle_timeout_s,
        # A disconnect cancels the handler: this is how it is detected (WP-1).
        handler_cancellation=True,
        # Decompression would block the loop, even for an unread body.
        auto_decompress=False,
        read_bufsize=READ_BUFFER_BYTES,
        access_log=None,
        shutdown_timeout=shutdown_timeout_s,
    )


@web.middleware
async def _edge(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Time and identify the request, check its key, and format errors in the path's dialect."""
    orchestrator = request.app[ORCHESTRATOR]
    context = new_context(request, orchestrator.clock, request.app[DIALECTS])
    request[CONTEXT] = context
    try:
        preflight = request.app[BROWSERS].preflight(request.method, request.headers)
        if preflight is not None:
            return preflight
        _identify(request, context)
        if not request.app[AUTH].has_several or context.key.is_admin or is_open_path(request.path):
            return await handler(request)
        with request.app[KEY_SHARES].counted(context.key.fingerprint):
            return await handler(request)
    except TidegateError as error:
        failure = error
        if error.item_id:
            try:
                forwarded = await request.app[ELSEWHERE].answer(request, error)
            except TidegateError as refusal:
                failure = refusal
            else:
                if forwarded is not None:
                    return forwarded
    except web.HTTPException as error:
        failure = _routing_error(request, error)
    except (asyncio.CancelledError, ConnectionError):
        raise
    except Exception:
        service_log.exception(
            "request handler failed", extra=fields(correlation_id=context.correlation_id)
        )
        if request.writer.output_size:  # too late for an error status
            raise ConnectionResetError("the response ended early") from None
        failure = TidegateError("an internal error occurred")
    request.app[HTTP_ERRORS].labels(context.dialect.status_of(failure), failure.code).inc()
    if context.deadline is None:
        arrival, policy = context.arrival, orchestrator.deadlines
        context.deadline = stated_deadline(request.headers, arrival, policy)
        if context.deadline is None and request.method == "POST":
            context.deadline = read_deadline(CIMultiDict(), None, arrival, policy)
    return error_response(failure, context, orchestrator.clock.now())


def _identify(request: web.Request, context: Context) -> None:
    """Set the client's id for the request, and its key. Raises ``TidegateError``."""
    auth, browsers = request.app[AUTH], request.app[BROWSERS]
    if is_open_path(request.path):
        with suppress(InvalidRequest):  # a probe's result must not depend on its own headers
            context.correlation_id = read_correlation_id(request, context.correlation_id)
        context.key = NOBODY
        with suppress(Unauthenticated):
            context.key = auth.check(request.headers)
        return
    context.correlation_id = read_correlation_id(request, context.correlation_id)
    if not auth.has_keys:
        browsers.check(request.method, request.headers)
    if is_page(request.path):
        return
    key = auth.check(request.headers)
    if is_admin_call(request.method, request.path):
        auth.require_admin(key)
    context.key = key


def _routing_error(request: web.Request, error: web.HTTPException) -> TidegateError:
    instead = (f"; {use}" for part, use in _INSTEAD.items() if part in request.path)
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        return MethodNotAllowed(
            f"{excerpt(request.method)} is not allowed at {excerpt(request.path, 256)}"
            f"{next(instead, f'; allowed: {allowed}')}",
            allowed=allowed,
        )
    if isinstance(error, web.HTTPNotFound):
        meant = (f"; try {excerpt(path, 256)}" for path in _likely_paths(request))
        hint = next(itertools.chain(instead, meant), "")
        return NotFound(f"there is nothing at {excerpt(request.path, 256)}{hint}")
    return InvalidRequest(f"the request cannot be served: {error.reason}")


def _likely_paths(request: web.Request) -> Iterator[str]:
    """Existing paths that differ from the request's by a common error in base URLs: no version, an
    extra prefix, an extra slash, another case, one letter."""
    path = re.sub("/{2,}", "/", request.path[:_PATH_CHARS]).rstrip("/")
    infos = [resource.get_info() for resource in request.app.router.resources()]
    behind = [path[at:] for at, char in enumerate(path) if char == "/"][:_MOST_PARTS]
    for found in (path, f"/v1{path}", f"/v2{path}", *behind):
        for info in infos if found not in ("", request.path) else ():
            pattern = info.get("pattern")
            if info.get("path") == found or (pattern and pattern.fullmatch(found)):
                yield found
                break
    served = [info["path"] for info in infos if "path" in info]
    yield from difflib.get_close_matches(path.lower(), served, 1, _ALIKE)


async def _close(app: web.Application) -> None:
    app[LARGE_BODIES].close()
    await app[ELSEWHERE].close()


async def _name_response(request: web.Request, response: web.StreamResponse) -> None:
    """Add the headers of every response: the request's id and the remaining limits of its key."""
    if CONTEXT in request:
        request[CONTEXT].body = None
        if request[CONTEXT].is_forwarded:  # it already has them
            return
    response.headers.update(request.app[BROWSERS].headers(request.headers))
    is_open = is_open_path(request.path)
    if not is_open:
        request.app[HTTP_RESPONSES].labels(response.status).inc()
    context = request.get(CONTEXT)
    if context is None:  # refused before any handler, with its headers
        return
    orchestrator = request.app[ORCHESTRATOR]
    for grammar in context.grammars:
        for keyword in orchestrator.stages.reader.grammars.passed_over(grammar):
            # Schema keywords that are not enforced are ignored like unknown fields.
            context.ignored.add(context.field_names.get("grammar", ""), keyword)
    name_response(response, context)
    if context.dialect.time_header:
        took_ms = 1000 * (orchestrator.clock.now() - context.arrival.mono)
        response.headers[context.dialect.time_header] = f"{took_ms:.0f}"
    if request.method == "POST" and response.status != 401 and not is_open:
        response.headers.update(
            rate_limit_headers(
                orchestrator.questions.standings(context.key.fingerprint),
                orchestrator.questions.queue_room if context.dialect.tells_queue else None,
            )
        )


def _tracing_middleware(tracing: "Tracing") -> Middleware:
    """Makes a span for each request (OR-16). Outermost, so that the span includes the last byte."""

    @web.middleware
    async def trace(request: web.Request, handler: Handler) -> web.StreamResponse:
        if is_open_path(request.path):  # health and metrics: frequent, and not from clients
            return await handler(request)
        resource = request.match_info.route.resource
        # Use the route, not the path: a task id would give every span a different name.
        route = resource.canonical if resource is not None else "unknown"
        parent = read_traceparent(request.headers.get("traceparent"))
        span = tracing.of_request(f"{request.method} {route}", parent)
        request[TRACE] = span.trace
        status: int | None = None
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            context = request.get(CONTEXT)
            span.end(
                {
                    "http.request.method": request.method,
                    "http.route": route,
                    "http.response.status_code": status,
                    "tidegate.correlation_id": context.correlation_id if context else None,
                },
                failed=status is None or status >= 500,
            )

    return trace
