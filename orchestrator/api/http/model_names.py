"""What models are called by clients, and what here."""

from collections.abc import Mapping

from aiohttp import web

from orchestrator.api.config import CONFIG
from orchestrator.api.http.context import ORCHESTRATOR

ANY_END = "*"
"""Behind an alias: it stands for all names that begin so."""


def served_name(request: web.Request, name: str | None) -> str:
    """Our name of the model that a client asks for; empty where it leaves that to us."""
    if not name:
        return ""
    aliases = request.app[CONFIG].model_aliases
    if name in aliases:
        return aliases[name]
    longest = max((one for one in aliases if _begins(name, one)), key=len, default=None)
    if longest is None or _is_ours(request, name):
        return name
    return aliases[longest]


def listed_aliases(app: web.Application) -> Mapping[str, str]:
    """Those that stand for one name each."""
    aliases = app[CONFIG].model_aliases
    return {name: model for name, model in aliases.items() if not name.endswith(ANY_END)}


def _begins(name: str, alias: str) -> bool:
    return alias.endswith(ANY_END) and name.startswith(alias.removesuffix(ANY_END))


def _is_ours(request: web.Request, name: str) -> bool:
    orchestrator = request.app[ORCHESTRATOR]
    return name in orchestrator.models.by_name() or name in orchestrator.stages.demand.loadable()
