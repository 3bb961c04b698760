"""What ``/openapi.json`` has to know of a route besides its path."""

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
    """The schema of a body of ``multipart/form-data``; None for another type of body."""


PLAIN = Operation()
"""A GET, or a POST without a body, that answers with JSON."""
