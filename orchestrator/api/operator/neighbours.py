"""Endpoints that clients, probes and dashboards of vLLM and of NVIDIA's NIM expect.

vLLM's ``/version``, ``/ping`` (SageMaker's probe) and ``/load``; NIM's ``/v1/health/live``,
``/v1/health/ready``, ``/v1/metadata`` and ``/v1/version``.
"""

from aiohttp import web

from orchestrator.api.http.context import HEALTH, ORCHESTRATOR
from orchestrator.api.http.responses import json_response
from orchestrator.api.http.version import VERSION


async def version(request: web.Request) -> web.Response:
    """Show the version of this service, in vLLM's form."""
    return json_response({"version": VERSION})


async def ping(request: web.Request) -> web.Response:
    """Check that the service takes work; 503 while work should go elsewhere. No body."""
    return web.Response(status=request.app[HEALTH].ready.status)


async def load(request: web.Request) -> web.Response:
    """Show how many requests wait or run."""
    return json_response({"server_load": request.app[ORCHESTRATOR].live_tasks})


async def live(request: web.Request) -> web.Response:
    """Check that the process answers, in NIM's words."""
    return _health(request.app[HEALTH].live.status, "live")


async def ready(request: web.Request) -> web.Response:
    """Check that the service takes work; 503 while work should go elsewhere, in NIM's words."""
    return _health(request.app[HEALTH].ready.status, "ready")


async def metadata(request: web.Request) -> web.Response:
    """Show version and models in NIM's form, without container assets or a profile."""
    models = sorted(request.app[ORCHESTRATOR].models.by_name())
    return json_response(
        {
            "version": VERSION,
            "modelInfo": [{"shortName": name, "modelUrl": ""} for name in models],
            "assetInfo": [],
            "licenseInfo": {"name": "Apache-2.0"},
            "repository_override": "",
            "selectedModelProfileId": "",
        }
    )


async def nim_version(request: web.Request) -> web.Response:
    """Show the version of this service, in NIM's form."""
    return json_response({"release": VERSION, "api": VERSION})


def routes() -> list[web.RouteDef]:
    return [
        web.get("/version", version),
        web.get("/ping", ping),
        web.post("/ping", ping),
        web.get("/load", load),
        web.get("/v1/health/live", live),
        web.get("/v1/health/ready", ready),
        web.get("/v1/metadata", metadata),
        web.get("/v1/version", nim_version),
    ]


def _health(status: int, name: str) -> web.Response:
    is_not = "" if status == 200 else "not "
    message = f"Service is {is_not}{name}."
    return json_response({"object": "health.response", "message": message}, status=status)
