"""What every request carries through its handler."""

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import msgspec
from aiohttp import web

from orchestrator.api.auth import ANYBODY, Key
from orchestrator.clock import Clock, Instant, instant
from orchestrator.errors import InvalidRequest, TidegateError
from orchestrator.service import Orchestrator
from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.task import Ending, Task

ORCHESTRATOR = web.AppKey("orchestrator", Orchestrator)

CORRELATION_HEADER = "X-Correlation-Id"
_CORRELATION_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}", re.ASCII)


class Dialect(Enum):
    """How errors are spelled."""

    NATIVE = "native"
    OPENAI = "openai"

    def error_object(self, error: TidegateError) -> dict[str, object]:
        return error.openai() if self is Dialect.OPENAI else error.native()


@dataclass(frozen=True, slots=True)
class Context:
    """One HTTP request's own facts."""

    arrival: Instant
    correlation_id: str
    dialect: Dialect
    key: Key = ANYBODY
    """Whose token it came with."""


CONTEXT = web.RequestKey("context", Context)


def dialect_of(path: str) -> Dialect:
    """By path, so that an unknown path still gets the errors of its API."""
    return Dialect.OPENAI if path == "/v1" or path.startswith("/v1/") else Dialect.NATIVE


def new_context(request: web.BaseRequest, clock: Clock) -> Context:
    """A request's that has just come, under a name of ours."""
    # CONNECT states no path but an authority; where somebody wrote one, that is what they meant.
    path = request.raw_path if request.method == "CONNECT" else request.path
    return Context(instant(clock), new_correlation_id(), dialect_of(path))


def new_correlation_id() -> str:
    return uuid.uuid4().hex


def read_correlation_id(request: web.Request, default: str) -> str:
    """The client's own. Raises ``InvalidRequest`` for one unfit to be passed on."""
    given = request.headers.get(CORRELATION_HEADER)
    if given is None:
        return default
    if not _CORRELATION_ID.fullmatch(given):
        raise InvalidRequest(
            f"{CORRELATION_HEADER} must be 1 to 128 letters, digits or any of . _ : @ / + = -",
            field=CORRELATION_HEADER,
        )
    return given


def json_response(
    value: object, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(value),
        status=status,
        content_type="application/json",
        headers=headers,
    )


def error_response(error: TidegateError, context: Context) -> web.Response:
    """An error as the dialect's body, with its headers."""
    return json_response(
        {"error": context.dialect.error_object(error)}, status=error.status, headers=error.headers()
    )


def fit_headers(task: Task) -> dict[str, str]:
    """Says so when ``max_tokens`` was shrunk to fit the deadline (DL-6)."""
    return {} if task.fitted_tokens is None else {"X-Fitted-Max-Tokens": str(task.fitted_tokens)}


def missed_headers(ending: Ending) -> dict[str, str]:
    """Says which part of an answer was late (DL-14)."""
    part = ending.missed_part
    return {} if part is None else {"X-Deadline-Missed-Part": part.value}


def deadline_headers(deadline: Deadline) -> dict[str, str]:
    """Says so when the client's deadline was cut (DL-1)."""
    if deadline.clamped_ms is None:
        return {}
    return {"X-Deadline-Clamped-Ms": f"{deadline.clamped_ms:.0f}"}
