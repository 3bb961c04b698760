"""What is known of an HTTP request, from its head to its answer."""

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from aiohttp import web
from prometheus_client import Counter

from orchestrator.api.auth import ANYBODY, Key
from orchestrator.api.http.ignored import Ignored
from orchestrator.clock import Clock, Instant, instant
from orchestrator.errors import InvalidRequest, TidegateError
from orchestrator.health import HealthBoard
from orchestrator.service import Orchestrator
from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.job import Job
from orchestrator.tasks.task import Task
from orchestrator.telemetry.trace_context import TraceContext, read_traceparent
from worker.protocol import Grammar

CORRELATION_HEADER = "X-Correlation-Id"
REQUEST_ID_HEADER = "x-request-id"
"""OpenAI's name for the same, which proxies use too."""
IGNORED_HEADERS = "x-tidegate-ignored-headers"
_CORRELATION_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}", re.ASCII)


def _own_status(error: TidegateError) -> int:
    return error.status


@dataclass(frozen=True, slots=True)
class Dialect:
    """An API's own spelling, as far as what every API shares needs it. Served below ``path``."""

    path: str
    error_body: Callable[[TidegateError, str], object]
    """Of an error, and the request's name."""
    status_of: Callable[[TidegateError], int] = _own_status
    request_id_header: str = REQUEST_ID_HEADER
    """Where its clients look for the request's name."""
    time_header: str = ""
    """In which clients of this API are told how long an answer took, in ms."""
    tells_queue: bool = False
    """Its rate limit headers tell of the queue too, which is what they run into first."""
    aliases: frozenset[str] = frozenset()
    """Paths of its own elsewhere."""
    is_tolerant: bool = False
    """Its clients are other people's: what they say that means nothing here is passed over, unless
    the operator wants it refused (``TIDEGATE_STRICT_FIELDS``)."""

    def serves(self, path: str) -> bool:
        return path == self.path or path.startswith(f"{self.path}/") or path in self.aliases


ORCHESTRATOR = web.AppKey("orchestrator", Orchestrator)
HEALTH = web.AppKey("health", HealthBoard)
HTTP_ERRORS = web.AppKey("http_errors", Counter)
"""Error responses, by ``status`` and ``code``."""
HTTP_RESPONSES = web.AppKey("http_responses", Counter)
"""All responses, by ``status``."""
DIALECTS = web.AppKey("dialects", Sequence[Dialect])
"""The last one is spoken wherever no other is."""


@dataclass(slots=True)
class Context:
    """One HTTP request's own facts, filled in as they become known."""

    arrival: Instant
    correlation_id: str
    dialect: Dialect
    key: Key = ANYBODY
    """Whose token it came with."""
    request_id: str = ""
    """The client's ``x-request-id``; empty where there is none that may be passed on."""
    deadline: Deadline | None = None
    field_names: Mapping[str, str] = field(default_factory=dict)
    """What this client calls fields that have another name with us."""
    ignored: Ignored | None = None
    """What of it was passed over; None where nothing may be."""
    grammars: tuple[Grammar, ...] = ()
    """One of these its answer must match."""
    ignored_headers: list[str] = field(default_factory=list)
    """Headers of gateways and SDKs that could not be read, or may not count; the answer names them.
    """
    task: Task | None = None
    """Once it is admitted."""
    adapt: Callable[[Job], Job] | None = None
    """What the service makes of the job of a request that it sends itself."""

    @property
    def answer_id(self) -> str:
        """What the answer calls the request."""
        return self.request_id or self.correlation_id


CONTEXT = web.RequestKey("context", Context)
TRACE = web.RequestKey("trace", TraceContext)
"""What spans of the request go beneath; where traces are sent."""


def new_context(request: web.BaseRequest, clock: Clock, dialects: Sequence[Dialect]) -> Context:
    """A request's that has just come, under a name of ours."""
    # CONNECT states no path but an authority; where somebody wrote one, that is what they meant.
    path = request.raw_path if request.method == "CONNECT" else request.path
    # By path, so that an unknown one still gets the errors of its API.
    dialect = next((dialect for dialect in dialects if dialect.serves(path)), dialects[-1])
    request_id = request.headers.get(REQUEST_ID_HEADER, "")
    if not _CORRELATION_ID.fullmatch(request_id):
        request_id = ""
    # So that who searches the logs for either finds it.
    return Context(instant(clock), request_id or uuid.uuid4().hex, dialect, request_id=request_id)


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


def trace_of(request: web.Request) -> TraceContext | None:
    """What the request is part of: the span that was made of it, else the caller's own."""
    return request.get(TRACE) or read_traceparent(request.headers.get("traceparent"))
