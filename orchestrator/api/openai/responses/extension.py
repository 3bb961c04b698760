"""The optional room for OpenAI's Responses (``/v1/responses``) and kept answers (OR-3)."""

from aiohttp import web

from orchestrator.api.openai.responses import routes
from orchestrator.api.openai.responses.store import KEPT_RESPONSES, ResponseStore
from orchestrator.extension import Core, Extension


class ResponsesRoom(Extension):
    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self._responses = ResponseStore(core.clock, KEPT_RESPONSES)
        core.sharing.keep("response", self._responses)
        core.metrics.keeps("responses", self._responses.kept)

    def attach(self, app: web.Application) -> None:
        app[routes.RESPONSES] = self._responses
        app.add_routes(routes.routes())
