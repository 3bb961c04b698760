"""``/health`` and ``/metrics``: responses that are prepared in advance (LB-4, OR-13)."""

import asyncio

from aiohttp import web

from orchestrator.api.http.context import CONTEXT, HEALTH, ORCHESTRATOR
from orchestrator.api.http.finding import ELSEWHERE
from orchestrator.api.operator.neighbours import VLLM_PREFIX
from orchestrator.errors import NotReady
from orchestrator.telemetry.metrics import labelled, merged


async def health(request: web.Request) -> web.Response:
    """Answer with the state at the last refresh of the board."""
    probe = request.app[HEALTH].by_path()[request.path]
    return web.Response(body=probe.body, status=probe.status, content_type="application/json")


async def metrics(request: web.Request) -> web.Response:
    """Show all metrics for Prometheus, or at ``/metrics/vllm`` only those with vLLM's names, for
    endpoint pickers, which poll often. Those of several processes have the label ``process``."""
    prefix = VLLM_PREFIX if request.path == "/metrics/vllm" else ""
    accept = request.headers.get("Accept", "")
    body, content_type = await request.app[ORCHESTRATOR].metrics.exposition(
        accept, tenants=request[CONTEXT].key.sees_tenants, prefix=prefix
    )
    process = request.app[ORCHESTRATOR].sharing.process
    if process:
        body = await _of_all(request, labelled(body, "process", process))
    return web.Response(body=body, headers={"Content-Type": content_type})


async def _of_all(request: web.Request, page: bytes) -> bytes:
    """A page of metrics, with the metrics of the other processes at this port that respond."""
    try:
        answers = await request.app[ELSEWHERE].of_siblings(request)
    except NotReady:
        return page
    pages = [page, *(answer.body for answer in answers if answer.status == 200)]
    await asyncio.sleep(0)
    return merged(pages) if len(pages) > 1 else page


def routes() -> list[web.RouteDef]:
    return [
        *(web.get(f"/health{part}", health) for part in ("", "/live", "/ready", "/startup")),
        web.get("/metrics", metrics),
        web.get("/metrics/vllm", metrics),
    ]
