"""Facts about one HTTP request, collected from its head to its answer."""

import re
import socket
import struct
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from aiohttp import web
from prometheus_client import Counter

from orchestrator.api.auth import ANYBODY, Authenticator, Key
from orchestrator.api.config import CONFIG
from orchestrator.api.http.ignored import Ignored
from orchestrator.clock import Clock, Instant, instant
from orchestrator.errors import InvalidRequest, TidegateError
from orchestrator.health import HealthBoard
from orchestrator.service import Orchestrator
from orchestrator.tasks.deadline import Deadline
from orchestrator.tasks.job import Job
from orchestrator.tasks.task import Task
from orchestrator.telemetry.trace_context import TraceContext, read_traceparent
from protocol import Grammar

ANY_END = "*"
"""Ends an alias that is a prefix."""
CORRELATION_HEADER = "X-Correlation-Id"
REQUEST_ID_HEADER = "x-request-id"
"""OpenAI's name for the correlation id's header, which proxies use too."""
_CORRELATION_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}", re.ASCII)


_LAST_DATA = struct.Struct("=52xI")
"""Milliseconds since data was received, in Linux' ``struct tcp_info``."""
_TICK_MS = 10
"""By how much that may be too long: a kernel's clock ticks a hundred times a second or faster."""


def _own_status(error: TidegateError) -> int:
    return error.status


@dataclass(frozen=True, slots=True)
class Dialect:
    """An API's own conventions, as far as shared code needs them. Served below ``path``."""

    path: str
    error_body: Callable[[TidegateError, str], object]
    """Makes an error's JSON body; the string is the request's id as the answer names it."""
    status_of: Callable[[TidegateError], int] = _own_status
    request_id_header: str = REQUEST_ID_HEADER
    """Header in which the API's clients look for the request's id."""
    time_header: str = ""
    """Header that tells clients of this API how long an answer took, in ms; empty for none."""
    tells_queue: bool = False
    """Whether rate limit headers also cover the queue, which clients would run into first."""
    aliases: frozenset[str] = frozenset()
    """Paths of the API outside ``path``."""
    is_tolerant: bool = False
    """Whether unknown fields are ignored, because its clients are written by others; not if the
    operator wants them refused (``TIDEGATE_HTTP__STRICT_FIELDS``)."""

    def serves(self, path: str) -> bool:
        return path == self.path or path.startswith(f"{self.path}/") or path in self.aliases


ORCHESTRATOR = web.AppKey("orchestrator", Orchestrator)
AUTH = web.AppKey("auth", Authenticator)
HEALTH = web.AppKey("health", HealthBoard)
HTTP_ERRORS = web.AppKey("http_errors", Counter)
"""Number of error responses, by ``status`` and ``code``."""
HTTP_RESPONSES = web.AppKey("http_responses", Counter)
"""Number of all responses, by ``status``."""
DIALECTS = web.AppKey("dialects", Sequence[Dialect])
"""All dialects; the last one is used wherever no other serves the path."""


@dataclass(slots=True)
class Context:
    """One HTTP request's own facts, filled in as they become known."""

    arrival: Instant
    correlation_id: str
    dialect: Dialect
    key: Key = ANYBODY
    """The key of the token that came with the request."""
    request_id: str = ""
    """The client's ``x-request-id``; empty without a valid one."""
    deadline: Deadline | None = None
    field_names: Mapping[str, str] = field(default_factory=dict)
    """The client's names for fields that are called something else here."""
    ignored: Ignored | None = None
    """Record of what was ignored in the request; None if nothing may be."""
    grammars: tuple[Grammar, ...] = ()
    """Grammars one of which the answer must match."""
    ignored_headers: list[str] = field(default_factory=list)
    """Headers of gateways and SDKs that cannot be read or may not count; the answer names them."""
    task: Task | None = None
    """The request's task, once it is admitted."""
    body: bytes | None = None
    """The body, where another orchestrator may have to get it; dropped once the answer begins."""
    is_forwarded: bool = False
    """Whether another orchestrator answers."""
    adapt: Callable[[Job], Job] | None = None
    """Changes the job, for requests that the service sends itself."""

    @property
    def answer_id(self) -> str:
        return self.request_id or self.correlation_id


CONTEXT = web.RequestKey("context", Context)
TRACE = web.RequestKey("trace", TraceContext)
"""Parent of the request's spans; set where traces are sent."""


def new_context(request: web.BaseRequest, clock: Clock, dialects: Sequence[Dialect]) -> Context:
    """Context of a new request, named by the client's ``x-request-id`` or an id of our own."""
    # CONNECT states no path but an authority; a path in its place is taken as one.
    path = request.raw_path if request.method == "CONNECT" else request.path
    read, waited_s = instant(clock), _waited_s(request)
    arrival = Instant(read.mono - waited_s, read.unix - waited_s)
    return context_of(path, request.headers, arrival, dialects)


def _waited_s(request: web.BaseRequest) -> float:
    """Seconds for which the last bytes from the client of ``request`` have waited in the kernel for
    a busy event loop, which its deadline does not wait for; 0 where that cannot be told. The kernel
    knows of the connection alone: a pipelined request waits from the end of the answer before."""
    transport = request.transport
    client = None if transport is None else transport.get_extra_info("socket")
    if client is None or sys.platform != "linux":
        return 0.0
    try:
        info = client.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _LAST_DATA.size)
        ago_ms = int(_LAST_DATA.unpack(info)[0])
    except (OSError, struct.error):  # not by TCP, or of an old kernel
        return 0.0
    in_turn_s = time.monotonic() - getattr(request.protocol, "answered_at", 0.0)
    return min(max(0, ago_ms - _TICK_MS) / 1000, in_turn_s)


def context_of(
    path: str, headers: Mapping[str, str], arrival: Instant, dialects: Sequence[Dialect]
) -> Context:
    """Context of a request to ``path`` with these headers, which arrived at ``arrival``."""
    # The dialect goes by the path, so that an unknown path still gets the errors of its API.
    dialect = next((dialect for dialect in dialects if dialect.serves(path)), dialects[-1])
    request_id = headers.get(REQUEST_ID_HEADER, "")
    if not _CORRELATION_ID.fullmatch(request_id):
        request_id = ""
    # One id for both, so that a search of the logs for either finds the request.
    return Context(arrival, request_id or uuid.uuid4().hex, dialect, request_id=request_id)


def read_correlation_id(request: web.Request, default: str) -> str:
    """The client's correlation id, else ``default``. Raises ``InvalidRequest``."""
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
    """The trace that the request is part of: its own span if there is one, else the caller's."""
    return request.get(TRACE) or read_traceparent(request.headers.get("traceparent"))


def served_name(request: web.Request, name: str | None) -> str:
    """Our name for the model that a client asks for; empty where it leaves that to us."""
    if not name:
        return ""
    aliases = request.app[CONFIG].model_aliases
    if name in aliases:
        return aliases[name]
    open_ended = (one for one in aliases if one.endswith(ANY_END))
    begun = (one for one in open_ended if name.startswith(one.removesuffix(ANY_END)))
    longest = max(begun, key=len, default=None)
    if longest is None or _is_ours(request, name):
        return name
    return aliases[longest]


def listed_aliases(app: web.Application) -> Mapping[str, str]:
    """Aliases that stand for one name each, with their models."""
    aliases = app[CONFIG].model_aliases
    return {name: model for name, model in aliases.items() if not name.endswith(ANY_END)}


def _is_ours(request: web.Request, name: str) -> bool:
    orchestrator = request.app[ORCHESTRATOR]
    return name in orchestrator.models.by_name() or name in orchestrator.stages.demand.loadable()
