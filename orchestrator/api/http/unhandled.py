"""Answers to what reaches no handler: malformed HTTP, and what aiohttp would refuse by itself.

aiohttp answers that in plain text with the bytes that it could not read, and logs them with a
traceback, which might contain a client's key or prompt (OR-16).
"""

from collections.abc import Sequence

from aiohttp import web
from aiohttp.http_exceptions import LineTooLong
from prometheus_client import Counter

from orchestrator.api.http.context import Context, Dialect, new_context
from orchestrator.api.http.deadlines import stated_deadline
from orchestrator.api.http.responses import error_response, name_response
from orchestrator.errors import InvalidRequest, TidegateError
from orchestrator.service import Orchestrator
from orchestrator.telemetry.log import fields, service_log

_LOG_EVERY_S = 1.0
"""Shortest time between two log lines on malformed requests."""


class Unhandled:
    """Answers in the dialect of the path, as far as there is one."""

    def __init__(
        self, orchestrator: Orchestrator, dialects: Sequence[Dialect], errors: Counter
    ) -> None:
        self._orchestrator = orchestrator
        self._dialects = dialects
        self._errors = errors
        self._malformed = 0
        self._log_at = 0.0

    def refused(self, request: web.BaseRequest, error: TidegateError) -> web.Response:
        """The answer to a request that is refused before any handler sees it."""
        orchestrator, context = self._orchestrator, self._context(request)
        context.deadline = stated_deadline(request.headers, context.arrival, orchestrator.deadlines)
        return self._answer(error, context)

    def malformed(self, request: web.BaseRequest, error: BaseException | None) -> web.Response:
        """The answer to bytes that are not a request; nothing of them is repeated or kept."""
        context = self._context(request)
        self._malformed += 1
        if context.arrival.mono >= self._log_at:
            self._log_at = context.arrival.mono + _LOG_EVERY_S
            service_log.info(
                "malformed HTTP request",
                extra=fields(
                    correlation_id=context.correlation_id,
                    reason=type(error).__name__,
                    count=self._malformed,
                ),
            )
            self._malformed = 0
        why = "it is not HTTP/1.1, or its length or a header is wrong"
        if isinstance(error, LineTooLong):
            why = "a line of its head is too long"
        return self._answer(InvalidRequest(f"the request cannot be read: {why}"), context)

    def _context(self, request: web.BaseRequest) -> Context:
        return new_context(request, self._orchestrator.clock, self._dialects)

    def _answer(self, error: TidegateError, context: Context) -> web.Response:
        self._errors.labels(context.dialect.status_of(error), error.code).inc()
        response = error_response(error, context, self._orchestrator.clock.now())
        name_response(response, context)
        response.force_close()
        return response
