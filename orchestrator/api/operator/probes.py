"""``/health`` and ``/metrics``: responses that are prepared in advance (LB-4, OR-13)."""

from aiohttp import web

from orchestrator.api.http.context import CONTEXT, HEALTH, ORCHESTRATOR
from orchestrator.api.operator.neighbours import VLLM_PREFIX


async def health(request: web.Request) -> web.Response:
    """Answer with the state at the last refresh of the board."""
    probe = request.app[HEALTH].by_path()[request.path]
    return web.Response(body=probe.body, status=probe.status, content_type="application/json")


async def metrics(request: web.Request) -> web.Response:
    """Show all metrics for Prometheus, or at ``/metrics/vllm`` only those with vLLM's names, for
    endpoint pickers, which poll often."""
    prefix = VLLM_PREFIX if request.path == "/metrics/vllm" else ""
    accept = request.headers.get("Accept", "")
    body, content_type = await request.app[ORCHESTRATOR].metrics.exposition(
        accept, tenants=request[CONTEXT].key.sees_tenants, prefix=prefix
    )
    return web.Response(body=body, headers={"Content-Type": content_type})


def routes() -> list[web.RouteDef]:
    return [
        *(web.get(f"/health{part}", health) for part in ("", "/live", "/ready", "/startup")),
        web.get("/metrics", metrics),
        web.get("/metrics/vllm", metrics),
    ]
