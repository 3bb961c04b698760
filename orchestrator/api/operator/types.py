"""What operators send."""

import math
from collections.abc import Callable

import msgspec
from aiohttp import web

from orchestrator.api.http.body import read_body
from orchestrator.errors import InvalidRequest

MAX_GRACE_MS = 24 * 3_600_000.0
"""Longer is no drain but an outage."""


class DrainRequest(msgspec.Struct, forbid_unknown_fields=True):
    """``grace_ms``: what runs may go on for so long."""

    grace_ms: float | None = None


class RegisterRequest(msgspec.Struct, forbid_unknown_fields=True):
    """``address``: ``host:port`` of a Triton's gRPC endpoint, for ``ttl_s`` seconds."""

    address: str
    ttl_s: float = 45.0


_registrations = msgspec.json.Decoder(RegisterRequest)
_decoder = msgspec.json.Decoder(DrainRequest)


async def read_grace_s(request: web.Request, default_s: float) -> float:
    """Of a drain, whose body may be left out. Raises ``InvalidRequest``."""
    if not request.body_exists:
        return default_s
    asked = (await read_body(request, _decoder, _same)).grace_ms
    if asked is None:
        return default_s
    if not 0 <= asked <= MAX_GRACE_MS or math.isnan(asked):
        raise InvalidRequest(
            f"grace_ms: must be from 0 to {MAX_GRACE_MS:.0f}, got {asked:g}", field="grace_ms"
        )
    return asked / 1000


async def read_registration(request: web.Request) -> RegisterRequest:
    """Which instance is there, and for how long. Raises ``InvalidRequest``."""
    return await read_body(request, _registrations, lambda asked: asked)


_same: Callable[[DrainRequest], DrainRequest] = lambda asked: asked  # noqa: E731
