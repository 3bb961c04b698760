"""A span for each HTTP request, where traces are sent at all (OR-16)."""

from typing import TYPE_CHECKING

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from orchestrator.api.auth import is_open_path
from orchestrator.api.http.context import CONTEXT, TRACE
from orchestrator.telemetry.trace_context import read_traceparent

if TYPE_CHECKING:
    from orchestrator.tasks.spans import Tracing


def tracing_middleware(tracing: "Tracing") -> Middleware:
    """Middleware that makes a span of each request. It must be the outermost, so that the span
    includes the answer's last byte."""

    @web.middleware
    async def trace(request: web.Request, handler: Handler) -> web.StreamResponse:
        if is_open_path(request.path):  # health and metrics: many, and of no client
            return await handler(request)
        resource = request.match_info.route.resource
        # The route, not the path: a task's id in the name would make each span one of its own kind.
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
