"""Bodies that operators send."""

import math
from dataclasses import dataclass

import msgspec
from aiohttp import web

from orchestrator.api.http.body import read_body
from orchestrator.api.http.decode import Reader
from orchestrator.errors import InvalidRequest

MAX_GRACE_MS = 24 * 3_600_000.0
"""Longest grace period in ms: a longer one is not a drain but an outage."""


class DrainRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a drain. ``grace_ms``: time for running work."""

    grace_ms: float | None = None


class RegisterRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Registration of a Triton's gRPC endpoint (``host:port``) or a URL, for ``ttl_s`` seconds."""

    address: str
    ttl_s: float = 45.0


class SwapRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a swap. ``model``: a name that the instance knows, or the path of a folder on its
    machine; ``name`` is then its name. ``settings`` are further settings of the worker by their
    dotted names, such as ``kv.blocks``. ``grace_ms``: time for running work, by default until its
    last deadline. ``wait`` answers once the swap is over. ``back`` instead of a model: the previous
    one."""

    model: str = ""
    name: str = ""
    settings: dict[str, str] = {}
    grace_ms: float | None = None
    wait: bool = False
    back: bool = False


class ReloadRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a reload; ``grace_ms`` and ``wait`` mean the same as in a swap."""

    grace_ms: float | None = None
    wait: bool = False


@dataclass(frozen=True, slots=True)
class AskedSwap:
    """A swap or reload that was asked for; ``settings`` are those of ``Swap``."""

    settings: dict[str, str]
    grace_s: float | None
    wait: bool


_reader = Reader(DrainRequest)
_registrations = Reader(RegisterRequest)
_swap_reader = Reader(SwapRequest)
_reload_reader = Reader(ReloadRequest)
MAX_SETTINGS = 64


async def read_grace_s(request: web.Request, default_s: float) -> float:
    """Grace period of a drain in seconds; the body may be left out. Raises ``InvalidRequest``."""
    if not request.body_exists:
        return default_s
    asked = await read_body(request, _reader, lambda body: body.grace_ms)
    return default_s if asked is None else _checked_grace_s(asked)


async def read_swap(request: web.Request) -> AskedSwap:
    """The swap that is asked for. Raises ``InvalidRequest``."""
    return await read_body(request, _swap_reader, _asked_swap)


def _asked_swap(body: SwapRequest) -> AskedSwap:
    settings = {name.lower(): value for name, value in body.settings.items()}
    if len(settings) > MAX_SETTINGS:
        raise InvalidRequest(f"settings: at most {MAX_SETTINGS}", field="settings")
    for name in ("model_path", "model_name"):
        if name in settings and (body.model or body.name):
            raise InvalidRequest(
                f"settings: {name} is stated by model and name already; leave one of them out",
                field="settings",
            )
    if body.model:
        is_path = body.model.startswith(("/", "~", ".")) or body.model.endswith(".gguf")
        settings["model_path" if is_path else "model_name"] = body.model
        if is_path and body.name:
            settings["model_name"] = body.name
    if body.back and settings:
        raise InvalidRequest("back: leave model, name and settings out", field="back")
    if not (body.back or "model_path" in settings or "model_name" in settings):
        raise InvalidRequest(
            "model: name one that the instance knows, or a path on its machine", field="model"
        )
    grace_s = None if body.grace_ms is None else _checked_grace_s(body.grace_ms)
    return AskedSwap(settings, grace_s, body.wait)


async def read_reload(request: web.Request) -> AskedSwap:
    """How to load the model again; the body may be left out. Raises ``InvalidRequest``."""
    if not request.body_exists:
        return _asked_reload(ReloadRequest())
    return await read_body(request, _reload_reader, _asked_reload)


def _asked_reload(body: ReloadRequest) -> AskedSwap:
    return AskedSwap(
        {}, None if body.grace_ms is None else _checked_grace_s(body.grace_ms), body.wait
    )


def _checked_grace_s(asked: float) -> float:
    if not 0 <= asked <= MAX_GRACE_MS or math.isnan(asked):
        raise InvalidRequest(
            f"grace_ms: must be from 0 to {MAX_GRACE_MS:.0f}, got {asked:g}", field="grace_ms"
        )
    return asked / 1000


async def read_registration(request: web.Request) -> RegisterRequest:
    """The instance to register, and for how long. Raises ``InvalidRequest``."""
    return await read_body(request, _registrations, lambda asked: asked)
