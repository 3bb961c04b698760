"""Data about one HTTP request, collected from its head to its response."""

import re
import socket
import struct
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from aiohttp import web
from prometheus_client import Counter

from orchestrator.api.auth import ANYBODY, Authenticator, Key
from orchestrator.api.config import ANY, CONFIG
from orchestrator.api.http.field_errors import must
from orchestrator.api.http.ignored import Ignored
from orchestrator.clock import Clock, Instant, instant
from orchestrator.errors import TidegateError
from orchestrator.health import HealthBoard
from orchestrator.service import Orchestrator
from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.job import Job
from orchestrator.tasks.task import Task
from orchestrator.telemetry.trace_context import TraceContext, read_traceparent
from protocol import Grammar

CORRELATION_HEADER = "X-Correlation-Id"
REQUEST_ID_HEADER = "x-request-id"
"""OpenAI's name for the header with the correlation id. Proxies use it too."""
NAME = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}", re.ASCII)
"""Names and correlation ids that are safe in headers, logs and metrics."""
NAME_RULE = "be 1 to 128 letters, digits or any of . _ : @ / + = -"

_LAST_DATA = struct.Struct("=52xI")
"""Milliseconds since the last received data, in Linux's ``struct tcp_info``."""
_TICK_MS = 10
"""Largest error of that time in ms: the kernel's clock ticks at least 100 times per second."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The conventions of an API that shared code needs. The API is served below ``path``."""

    path: str
    error_body: Callable[[TidegateError, str], object]
    """Makes the JSON body of an error. The string is the request's id in the response."""
    status_of: Callable[[TidegateError], int] = attrgetter("status")
    request_id_header: str = REQUEST_ID_HEADER
    """Header in which the API's clients expect the request's id."""
    time_header: str = ""
    """Header with the duration of the request in ms; empty if the API has none."""
    tells_queue: bool = False
    """Whether rate limit headers also cover the queue. Clients would hit its limit first."""
    is_tolerant: bool = False
    """Whether unknown fields are ignored, because the API has third-party clients. The setting
    ``TIDEGATE_HTTP__STRICT_FIELDS`` turns this off."""

    def serves(self, path: str) -> bool:
        return path == self.path or path.startswith(f"{self.path}/")


ORCHESTRATOR = web.AppKey("orchestrator", Orchestrator)
AUTH = web.AppKey("auth", Authenticator)
HEALTH = web.AppKey("health", HealthBoard)
HTTP_ERRORS = web.AppKey("http_errors", Counter)
"""Number of error responses, by ``status`` and ``code``."""
HTTP_RESPONSES = web.AppKey("http_responses", Counter)
"""Number of all responses, by ``status``."""
DIALECTS = web.AppKey("dialects", Sequence[Dialect])
"""All dialects. The last one is used for paths that no other dialect serves."""


@dataclass(slots=True)
class Context:
    """Data about one HTTP request. Fields are set as their values become known."""

    arrival: Instant
    correlation_id: str
    dialect: Dialect
    key: Key = ANYBODY
    """The key of the request's token."""
    request_id: str = ""
    """The client's ``x-request-id``; empty if it sent no valid one."""
    deadline: Deadline | None = None
    field_names: Mapping[str, str] = field(default_factory=dict)
    """The client's names for fields with another name here."""
    ignored: Ignored = field(default_factory=Ignored)
    """The ignored fields of the request."""
    grammars: tuple[Grammar, ...] = ()
    """Grammars of which the answer must match one."""
    ignored_headers: list[str] = field(default_factory=list)
    """Ignored headers of gateways and SDKs: unreadable or not allowed. The response names them."""
    task: Task | None = None
    """The request's task, once it is admitted."""
    body: bytes | None = None
    """The body, kept until the response begins if it may be forwarded to another orchestrator."""
    is_forwarded: bool = False
    """Whether another orchestrator answers the request."""
    adapt: Callable[[Job], Job] | None = None
    """Changes the job of a request that the service itself sends."""

    @property
    def answer_id(self) -> str:
        return self.request_id or self.correlation_id


CONTEXT = web.RequestKey("context", Context)
TRACE = web.RequestKey("trace", TraceContext)
"""Parent of the request's spans; set only if traces are exported."""


def new_context(request: web.BaseRequest, clock: Clock, dialects: Sequence[Dialect]) -> Context:
    """Context of a new request. Its id is the client's ``x-request-id``, or a generated one."""
    # CONNECT has an authority instead of a path. If it has a path, use that.
    path = request.raw_path if request.method == "CONNECT" else request.path
    read, waited_s = instant(clock), _waited_s(request)
    arrival = Instant(read.mono - waited_s, read.unix - waited_s)
    return context_of(path, request.headers, arrival, dialects)


def _waited_s(request: web.BaseRequest) -> float:
    """Seconds that the last bytes of ``request`` waited in the kernel for a busy event loop. The
    deadline counts this time. 0 if it is unknown. The kernel knows the connection, not requests: a
    pipelined request counts from the end of the previous response."""
    transport = request.transport
    client = None if transport is None else transport.get_extra_info("socket")
    if client is None:
        return 0.0
    try:
        info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA.size)
        ago_ms = int(_LAST_DATA.unpack(info)[0])
    except (OSError, struct.error):  # not TCP, or an old kernel
        return 0.0
    in_turn_s = time.monotonic() - getattr(request.protocol, "answered_at", 0.0)
    return min(max(0, ago_ms - _TICK_MS) / 1000, in_turn_s)


def context_of(
    path: str, headers: Mapping[str, str], arrival: Instant, dialects: Sequence[Dialect]
) -> Context:
    """Context of a request to ``path`` with these headers that arrived at ``arrival``."""
    request_id = headers.get(REQUEST_ID_HEADER, "")
    if not NAME.fullmatch(request_id):
        request_id = ""
    # Use one id for both, so that a log search for either finds the request.
    correlation_id = request_id or uuid.uuid4().hex
    # Unknown paths too have a dialect: they get errors in the style of their API.
    dialect = next((one for one in dialects if one.serves(path)), dialects[-1])
    return Context(arrival, correlation_id, dialect, request_id=request_id)


def read_correlation_id(request: web.Request, default: str) -> str:
    """The client's correlation id, or ``default``. Raises ``InvalidRequest``."""
    given = request.headers.get(CORRELATION_HEADER, default)
    if not NAME.fullmatch(given):
        raise must(CORRELATION_HEADER, NAME_RULE)
    return given


def trace_of(request: web.Request) -> TraceContext | None:
    """The parent for spans of the request: its own span if it has one, else the caller's."""
    return request.get(TRACE) or read_traceparent(request.headers.get("traceparent"))


def served_name(request: web.Request, name: str | None) -> str:
    """Our name for the requested model; empty if the client names no model."""
    if not name:
        return ""
    aliases = request.app[CONFIG].model_aliases
    if name in aliases:
        return aliases[name]
    open_ended = (one for one in aliases if one.endswith(ANY))
    begun = (one for one in open_ended if name.startswith(one.removesuffix(ANY)))
    if (longest := max(begun, key=len, default=None)) is None:
        return name
    orchestrator = request.app[ORCHESTRATOR]
    is_ours = name in orchestrator.models.by_name() or name in orchestrator.stages.demand.loadable()
    return name if is_ours else aliases[longest]


def listed_aliases(app: web.Application) -> Mapping[str, str]:
    """Aliases without a ``*``, with their models."""
    aliases = app[CONFIG].model_aliases
    return {name: model for name, model in aliases.items() if not name.endswith(ANY)}
