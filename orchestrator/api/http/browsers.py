"""Restricts requests from web pages.

A page in a local browser can send requests to this service. While no key is configured, two headers
of each request are checked (with a key, the token is stronger proof)::

    Host      must be ours: otherwise DNS rebinding gives any page our origin
    Origin    must be ours for changes: a page can send such requests without a preflight

Operators' calls also need a key, which no page knows (``auth``).

Pages from ``cors_origins`` may send requests and read the responses (the Fetch standard, "CORS
protocol").
"""

import re
from collections.abc import Mapping
from urllib.parse import urlsplit

from aiohttp import web

from catalog.hosts import is_loopback
from orchestrator.api.config import ANY
from orchestrator.errors import Forbidden
from orchestrator.settings.sections import HttpSettings

_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_METHODS = "GET, HEAD, POST, DELETE"
_MAX_AGE_S = 600
_HOST = re.compile(r"(\[[0-9a-f:.]+\]|[^\[\]:/@]+)(?::\d*)?", re.ASCII | re.IGNORECASE)
_HEADER_NAMES = re.compile(r"[A-Za-z0-9_-]+(?:[ \t]*,[ \t]*[A-Za-z0-9_-]+)*", re.ASCII)
_MAX_HEADER_NAMES = 2048
"""Most characters of a list of header names. OpenAI's SDK sends about 300."""
_EXPOSED = (
    "X-Correlation-Id, x-request-id, request-id, X-Deadline-Budget, X-Deadline-Clamped-Ms, "
    "X-Deadline-Exceeded-By-Ms, X-Deadline-Missed-Part, X-Deadline-Reserved, X-Deadline-Source, "
    "X-Fitted-Max-Tokens, x-tidegate-ignored, Retry-After, retry-after-ms, x-should-retry, "
    "openai-processing-ms, Idempotent-Replayed, x-ratelimit-limit-requests, "
    "x-ratelimit-limit-tokens, x-ratelimit-remaining-requests, x-ratelimit-remaining-tokens, "
    "x-ratelimit-reset-requests, x-ratelimit-reset-tokens"
)


class Browsers:
    """Checks hosts and origins: this service's own, and those that may use it."""

    def __init__(self, settings: HttpSettings) -> None:
        self._hosts = frozenset(_bare(host) for host in settings.allowed_hosts)
        self._any_host = ANY in settings.allowed_hosts
        self._origins = frozenset(origin.lower() for origin in settings.cors_origins)
        self._any_origin = ANY in settings.cors_origins

    def check(self, method: str, headers: Mapping[str, str]) -> None:
        """Check a request to a service without keys. Raises ``Forbidden`` if a foreign page may
        have sent it. A page's request always has ``Host`` and, for changes, ``Origin``."""
        host = headers.get("Host")
        if not (host is None or self._any_host or self._is_our_name(_bare(host))):
            raise Forbidden(
                f"this service is not known as {host[:128]}: ask it as localhost, or name the host "
                f"in TIDEGATE_HTTP__ALLOWED_HOSTS",
                field="Host",
            )
        origin = headers.get("Origin")
        if origin is None or method in _SAFE_METHODS:
            return
        if not self._welcomes(origin) and not self._is_our_origin(origin, host):
            raise _foreign(origin, "change anything")

    def preflight(self, method: str, headers: Mapping[str, str]) -> web.Response | None:
        """The response to a browser's preflight request; None for other requests. Raises
        ``Forbidden`` if the origin may not use the service."""
        if not self._origins or method != "OPTIONS":
            return None
        if "Access-Control-Request-Method" not in headers or "Origin" not in headers:
            return None
        if not self._welcomes(headers["Origin"]):
            raise _foreign(headers["Origin"], "send requests")
        answer = {
            "Access-Control-Allow-Methods": _METHODS,
            "Access-Control-Max-Age": str(_MAX_AGE_S),
        }
        asked = headers.get("Access-Control-Request-Headers", "")
        if len(asked) <= _MAX_HEADER_NAMES and _HEADER_NAMES.fullmatch(asked):
            answer["Access-Control-Allow-Headers"] = ", ".join(map(str.strip, asked.split(",")))
        return web.Response(status=204, headers=answer)

    def headers(self, asked: Mapping[str, str]) -> dict[str, str]:
        """CORS headers for the response to a request with the headers ``asked``."""
        if not self._origins:
            return {}
        answer = {} if self._any_origin else {"Vary": "Origin"}
        origin = asked.get("Origin")
        if origin is None or not self._welcomes(origin):
            return answer
        answer["Access-Control-Allow-Origin"] = ANY if self._any_origin else origin
        answer["Access-Control-Expose-Headers"] = _EXPOSED
        return answer

    def _welcomes(self, origin: str) -> bool:
        return self._any_origin or origin.lower() in self._origins

    def _is_our_origin(self, origin: str, host: str | None) -> bool:
        """Whether ``origin`` is this service, at ``host``, or this machine."""
        try:
            found = urlsplit(origin)
            name = (found.hostname or "").removesuffix(".")
        except ValueError:
            return False
        if found.scheme not in ("http", "https") or not name:
            return False
        return self._is_our_name(name) or (host is not None and found.netloc == host.lower())

    def _is_our_name(self, name: str) -> bool:
        return name in self._hosts or name.endswith(".localhost") or is_loopback(name)


BROWSERS = web.AppKey("browsers", Browsers)


def _foreign(origin: str, action: str) -> Forbidden:
    return Forbidden(
        f"pages from {origin[:128]} may not {action} here; "
        f"add the origin to TIDEGATE_HTTP__CORS_ORIGINS to allow it",
        field="Origin",
    )


def _bare(host: str) -> str:
    """A host without its port, brackets and final dot; empty if it is not valid."""
    match = _HOST.fullmatch(host.strip().lower())
    return match[1].strip("[]").removesuffix(".") if match else ""
