"""``/admin``: operators' control of the process (OR-14)."""

from collections.abc import Callable
from dataclasses import dataclass

from aiohttp import web

from orchestrator.api.auth import Authenticator, Key
from orchestrator.api.http.context import ORCHESTRATOR
from orchestrator.api.http.responses import json_response
from orchestrator.api.operator.types import DrainRequest, read_optional
from orchestrator.lifecycle import Lifecycle
from orchestrator.reload import Reloader
from orchestrator.settings import Settings


@dataclass(frozen=True, slots=True)
class Control:
    lifecycle: Lifecycle
    reloader: Reloader
    keys_of: Callable[[Settings], tuple[Key, ...]]

    def follow_keys(self, auth: Authenticator) -> None:
        keys = ("token", "admin_token", "keys")
        self.reloader.follow(keys, lambda new: auth.replace(self.keys_of(new)))


CONTROL = web.AppKey("control", Control)


async def drain(request: web.Request) -> web.Response:
    """Refuse new work and let running work finish; the process stays. Shows the progress."""
    control, asked = request.app[CONTROL], await read_optional(request, DrainRequest)
    usual_s = control.reloader.settings.shutdown.grace_s
    control.lifecycle.begin_drain(usual_s if asked.grace_s is None else asked.grace_s)
    return json_response(_described(request), status=202)


async def undrain(request: web.Request) -> web.Response:
    """Accept new work again. Idempotent."""
    request.app[CONTROL].lifecycle.undrain()
    return json_response(_described(request))


async def state(request: web.Request) -> web.Response:
    """Show the progress of a drain."""
    return json_response(_described(request))


async def reload(request: web.Request) -> web.Response:
    """Read the settings and keys again. Names the settings that only change with a restart."""
    return json_response((await request.app[CONTROL].reloader.reload()).described())


def _described(request: web.Request) -> dict[str, object]:
    """Progress of the drain."""
    lifecycle, orchestrator = request.app[CONTROL].lifecycle, request.app[ORCHESTRATOR]
    draining = orchestrator.stages.admission.draining
    return {
        "status": "drained" if lifecycle.is_drained else "draining" if draining else "serving",
        "live_tasks": orchestrator.live_tasks,
        "queued_tasks": len(orchestrator.queue),
        "graceful_shutdown_duration_ms": round(lifecycle.drain_ms, 1),
    }


def routes() -> list[web.RouteDef]:
    return [
        web.get("/admin/drain", state),
        web.post("/admin/drain", drain),
        web.post("/admin/undrain", undrain),
        web.post("/admin/reload", reload),
    ]
