"""``GET /v2/capabilities``: the service's features and limits (OR-2)."""

from aiohttp import web

from orchestrator.admission.images import MAX_COUNT, MAX_PIXELS
from orchestrator.api.config import CONFIG, VERSION
from orchestrator.api.http.context import ORCHESTRATOR
from orchestrator.api.http.responses import json_response
from orchestrator.tasks.job import MAX_IDLE_KEEP_S, Api
from protocol import Feature, OnDeadline


async def capabilities(request: web.Request) -> web.Response:
    """Show the service's features and limits."""
    orchestrator = request.app[ORCHESTRATOR]
    room = orchestrator.questions.queue_room
    cards = [one.card for one in orchestrator.registry if one.ready and one.card is not None]
    added: dict[str, object] = {}
    for each in orchestrator.rooms:
        added |= each.capabilities()
    return json_response(
        {
            "version": VERSION,
            "apis": sorted(Api),
            "on_deadline": sorted(OnDeadline),
            "models": sorted(orchestrator.models.by_name()),
            "loadable": sorted(orchestrator.stages.demand.loadable()),
            # Those that the engine of at least one ready instance supports.
            "features": [
                name
                for name in sorted(Feature)
                if any(name not in card.all_lacks for card in cards)
            ],
            "durable": orchestrator.stages.durable is not None,
            "isolated_prefixes": orchestrator.isolate_tenants,
            "limits": {
                "body_bytes": request.app[CONFIG].http.max_body_bytes,
                "default_deadline_ms": round(1000 * orchestrator.deadlines.default_s),
                "max_deadline_ms": round(1000 * orchestrator.deadlines.max_s),
                "max_idle_keep_s": MAX_IDLE_KEEP_S,
                "queue": None if room is None else room.bound,
                "images": MAX_COUNT,
                "image_pixels": MAX_PIXELS,
            },
            **added,
        }
    )


def routes() -> list[web.RouteDef]:
    return [web.get("/v2/capabilities", capabilities)]
