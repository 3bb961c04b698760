"""Data about a route, besides its path, for ``/openapi.json``."""

from collections.abc import Mapping
from typing import NamedTuple

JSON = "application/json"
EVENTS = "text/event-stream"
TEXT = "text/plain"
HTML = "text/html"


class Operation(NamedTuple):
    """One route. ``gives`` are the media types of a successful answer."""

    body: type | None = None
    gives: tuple[str, ...] = (JSON,)
    statuses: tuple[int, ...] = (200,)
    parameters: tuple[str, ...] = ()
    """Names of query parameters."""
    body_is_optional: bool = False
    takes: Mapping[str, object] | None = None
    """The schema of a ``multipart/form-data`` body; None for other types of body."""


PLAIN = Operation()
"""A GET, or a POST without a body, that answers with JSON."""
