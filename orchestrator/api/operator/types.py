"""Bodies of operators' requests."""

from typing import Annotated, TypeVar

import msgspec
from aiohttp import web

from orchestrator.api.http.body import read_body
from orchestrator.api.http.field_errors import wrong

MAX_GRACE_MS = 24 * 3_600_000.0
"""Longest grace period in ms. A longer drain would be an outage."""
MAX_SETTINGS = 64


class DrainRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of a drain request. ``grace_ms``: time for running work."""

    grace_ms: Annotated[float, msgspec.Meta(ge=0, le=MAX_GRACE_MS)] | None = None

    @property
    def grace_s(self) -> float | None:
        return None if self.grace_ms is None else self.grace_ms / 1000


class RegisterRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Registration of a Triton gRPC endpoint (``host:port``) or a URL for ``ttl_s`` seconds."""

    address: str
    ttl_s: float = 45.0


class ReloadRequest(DrainRequest, forbid_unknown_fields=True):
    """Body of a reload request. ``grace_ms``: time for running work; default: until its last
    deadline. ``wait``: the response is sent after the model is loaded."""

    wait: bool = False


class SwapRequest(ReloadRequest, forbid_unknown_fields=True):
    """Body of a swap request. ``model``: a name that the instance knows, or the path of a folder on
    its machine; ``name`` is then the model's name. ``settings``: more settings of the worker by
    dotted names, such as ``kv.blocks``."""

    model: str = ""
    name: str = ""
    settings: dict[str, str] = {}

    def for_worker(self) -> dict[str, str]:
        """The settings of ``protocol.Swap``. Raises ``InvalidRequest``."""
        settings = {name.lower(): value for name, value in self.settings.items()}
        if len(settings) > MAX_SETTINGS:
            raise wrong("settings", f"send at most {MAX_SETTINGS}")
        for name in ("model_path", "model_name"):
            if name in settings and (self.model or self.name):
                why = f"{name} is already set by model or name; leave one of them out"
                raise wrong("settings", why)
        if self.model:
            is_path = self.model.startswith(("/", "~", ".")) or self.model.endswith(".gguf")
            settings["model_path" if is_path else "model_name"] = self.model
            if is_path and self.name:
                settings["model_name"] = self.name
        if not ("model_path" in settings or "model_name" in settings):
            raise wrong("model", "send a name that the instance knows, or a path on its machine")
        return settings


T = TypeVar("T")


async def read_optional(request: web.Request, kind: type[T]) -> T:
    """The body, or an empty object if there is none. Raises ``InvalidRequest``."""
    if not request.body_exists:
        return kind()
    return await read_body(request, kind, lambda asked: asked)
