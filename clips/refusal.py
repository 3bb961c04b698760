"""The answer of ``/v2/slots`` if the service renders no clips."""

from aiohttp import web

from orchestrator.errors import NotFound


async def refuse(request: web.Request) -> web.Response:
    raise NotFound(
        "no clips are served here: set TIDEGATE_SLOTS__SERVE=true where instances have the slot "
        "model, or start with tidegate up --slot"
    )


def routes() -> list[web.RouteDef]:
    return [web.route("*", "/v2/slots{rest:.*}", refuse)]
