"""Ignores and reports unknown fields and values instead of refusing them.

Clients send new fields every month. Most of them do not affect the answer. Each ignored field is
named in a response header, logged once, and counted by route and place.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from aiohttp import web
from prometheus_client import Counter

from orchestrator.errors import InvalidRequest
from orchestrator.telemetry.log import fields, service_log
from orchestrator.telemetry.metrics import Metrics

IGNORED_HEADER = "x-tidegate-ignored"
"""Header with the names of ignored fields (as paths in the body) and headers."""
_OF_HEADERS = "header:"
"""Prefix of header names, to distinguish them from fields."""
MAX_NAMES = 32
"""Most names reported for one request."""
MAX_LOGGED = 500
"""Most names remembered to log each one only once."""
_MAX_NAME_CHARS = 64
_MAX_HEADER_CHARS = 1024
_AND_MORE = "..."
_UNFIT = re.compile(r"[^A-Za-z0-9_.$@/:+=-]", re.ASCII)
"""Characters that are not safe in a header or in a log that is read as a table."""


class Ignored:
    """Names of the ignored fields and values of one request."""

    def __init__(self) -> None:
        self.places: dict[str, str] = {}
        """Place of each ignored name in the body's type (``messages[]``), by path."""
        self.has_more = False
        """Whether more fields were ignored than are named."""

    def add(self, place: str, name: str) -> None:
        name = _UNFIT.sub("?", name[:_MAX_NAME_CHARS])
        path = f"{place}.{name}" if place else name
        if path in self.places:
            return
        if len(self.places) >= MAX_NAMES:
            self.has_more = True
            return
        self.places[path] = place


def header_of(ignored: Ignored, headers: Iterable[str]) -> str:
    """Value of the response's ``IGNORED_HEADER``; empty if nothing was ignored. It starts with
    ``headers``, the ignored headers of the request."""
    told, has_more = "", ignored.has_more
    for name in (*(_OF_HEADERS + name for name in headers), *ignored.places):
        longer = f"{told}, {name}" if told else name
        if len(longer) > _MAX_HEADER_CHARS:
            has_more = True
            break
        told = longer
    return f"{told}, {_AND_MORE}" if has_more else told


class IgnoredFields:
    """Logs and counts ignored fields and values."""

    def __init__(self, metrics: Metrics) -> None:
        self._counter: Counter = metrics.counter(
            "ignored_fields",
            "fields",
            "Ignored fields and values of requests, by route and place in the body",
            "route",
            "place",
        )
        self._logged: set[tuple[str, str]] = set()

    def tell(self, route: str, ignored: Ignored) -> None:
        """Log and count the ignored names of a request. ``route`` is the router's pattern."""
        for name, place in ignored.places.items():
            self._counter.labels(route, place or "body").inc()
            if (route, name) in self._logged or len(self._logged) >= MAX_LOGGED:
                continue
            self._logged.add((route, name))
            service_log.info(
                "a request has a field that is not supported here; it is ignored and not logged "
                "again (set TIDEGATE_HTTP__STRICT_FIELDS=true to refuse it)",
                extra=fields(route=route, ignored=name),
            )
            if len(self._logged) == MAX_LOGGED:
                service_log.info(
                    "no more ignored fields are logged; responses still name them",
                    extra=fields(header=IGNORED_HEADER),
                )


IGNORED_FIELDS = web.AppKey("ignored_fields", IgnoredFields)

_current: ContextVar[Ignored | None] = ContextVar("ignored", default=None)


@contextmanager
def passing_over(ignored: Ignored) -> Iterator[None]:
    """Record unsupported fields of a body in ``ignored``. Outside of this, they are refused."""
    token = _current.set(ignored)
    try:
        yield
    finally:
        _current.reset(token)


def pass_over(place: str, name: str, otherwise: InvalidRequest) -> None:
    """Record ``name`` as ignored. Raises ``otherwise`` if requests are read strictly."""
    ignored = _current.get()
    if ignored is None:
        raise otherwise
    ignored.add(place, name)


passed_over = _current.get
"""Returns the ignored names of the current request so far; None if it is read strictly."""
