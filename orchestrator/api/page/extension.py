"""The page at ``/``."""

from types import ModuleType

from orchestrator.api.page import page
from orchestrator.extension import Extension


class PageRoom(Extension):
    def edges(self) -> tuple[ModuleType, ...]:
        return (page,)
