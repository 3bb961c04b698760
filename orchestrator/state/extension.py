"""HTTP extension of the shared state: forwards requests to the orchestrator that has their data."""

from aiohttp import web

from orchestrator.api.http.finding import ELSEWHERE
from orchestrator.extension import Extension
from orchestrator.settings import Settings
from orchestrator.state.section import StateSection


class SharedStateRoom(Extension):
    """Forwards requests if several orchestrators share a state."""

    @classmethod
    def is_wanted(cls, settings: Settings) -> bool:
        return settings.section(StateSection).url is not None

    def attach(self, app: web.Application) -> None:
        # Imported only when needed: the store's library is an extra.
        from orchestrator.state.forwarding import Forwarding
        from orchestrator.state.shared_state import SharedState

        if isinstance(self.core.sharing, SharedState):
            app[ELSEWHERE] = Forwarding(self.core.sharing)
