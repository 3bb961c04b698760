"""Fields and values without a meaning here: ignored rather than refused, and reported.

Clients send new fields every month, most of which change nothing about an answer. Each is named in
a header of the answer, once in the log, and counted by route and place.
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
"""Header that names what was ignored: fields of the body by their path, and headers."""
_OF_HEADERS = "header:"
"""Prefix of a header's name, so that it cannot be taken for a field's."""
MAX_NAMES = 32
"""Most names that are reported for one request."""
MAX_LOGGED = 500
"""Most names that are remembered, so that each is logged once."""
_MAX_NAME_CHARS = 64
_MAX_HEADER_CHARS = 1024
_AND_MORE = "..."
_UNFIT = re.compile(r"[^A-Za-z0-9_.$@/:+=-]", re.ASCII)
"""Characters that are unfit for a header, and for a log that is read as a table."""


class Ignored:
    """Fields and values that were ignored in one request, by name."""

    def __init__(self) -> None:
        self.places: dict[str, str] = {}
        """Place of each ignored name, as the body's type has it (``messages[]``), by path."""
        self.has_more = False
        """Whether there are more that are not named."""

    def add(self, place: str, name: str) -> None:
        name = _UNFIT.sub("?", name[:_MAX_NAME_CHARS])
        path = f"{place}.{name}" if place else name
        if path in self.places:
            return
        if len(self.places) >= MAX_NAMES:
            self.has_more = True
            return
        self.places[path] = place


def header_of(ignored: Ignored | None, headers: Iterable[str]) -> str:
    """Value of the answer's ``IGNORED_HEADER``; empty where nothing was ignored. ``headers`` are
    those of the request that were ignored, which come first."""
    told, has_more = "", ignored is not None and ignored.has_more
    for name in (*(_OF_HEADERS + name for name in headers), *(ignored.places if ignored else ())):
        longer = f"{told}, {name}" if told else name
        if len(longer) > _MAX_HEADER_CHARS:
            has_more = True
            break
        told = longer
    return f"{told}, {_AND_MORE}" if has_more else told


class IgnoredFields:
    """Logs and counts what is ignored."""

    def __init__(self, metrics: Metrics) -> None:
        self._counter: Counter = metrics.counter(
            "ignored_fields",
            "fields",
            "What requests said that means nothing here, by route and place in the body",
            "route",
            "place",
        )
        self._logged: set[tuple[str, str]] = set()

    def tell(self, route: str, ignored: Ignored) -> None:
        """Log and count what was ignored in a request to ``route``, as the router spells it."""
        for name, place in ignored.places.items():
            self._counter.labels(route, place or "body").inc()
            if (route, name) in self._logged or len(self._logged) >= MAX_LOGGED:
                continue
            self._logged.add((route, name))
            service_log.info(
                "A client sends what means nothing here: it is passed over, and not logged again "
                "(TIDEGATE_HTTP__STRICT_FIELDS=true refuses it).",
                extra=fields(route=route, ignored=name),
            )
            if len(self._logged) == MAX_LOGGED:
                service_log.info(
                    "No more ignored fields are logged; answers still name them.",
                    extra=fields(header=IGNORED_HEADER),
                )


IGNORED_FIELDS = web.AppKey("ignored_fields", IgnoredFields)

_current: ContextVar[Ignored | None] = ContextVar("ignored", default=None)


@contextmanager
def passing_over(ignored: Ignored | None) -> Iterator[None]:
    """Record in ``ignored`` what a body has without meaning; with None it is refused."""
    token = _current.set(ignored)
    try:
        yield
    finally:
        _current.reset(token)


def pass_over(place: str, name: str, otherwise: InvalidRequest) -> None:
    """Record ``name`` as ignored. Raises ``otherwise`` where requests are read strictly."""
    ignored = _current.get()
    if ignored is None:
        raise otherwise
    ignored.add(place, name)


def passed_over() -> Ignored | None:
    """Record of what is ignored in the request being read; None if nothing may be."""
    return _current.get()
