"""Clients' names for models, and ours."""

from collections.abc import Mapping

from aiohttp import web

from orchestrator.api.config import CONFIG
from orchestrator.api.http.context import ORCHESTRATOR

ANY_END = "*"
"""Ends an alias that stands for all names that begin like it."""


def served_name(request: web.Request, name: str | None) -> str:
    """Our name for the model that a client asks for; empty where it leaves that to us."""
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
    """Aliases that stand for one name each, with their models."""
    aliases = app[CONFIG].model_aliases
    return {name: model for name, model in aliases.items() if not name.endswith(ANY_END)}


def _begins(name: str, alias: str) -> bool:
    return alias.endswith(ANY_END) and name.startswith(alias.removesuffix(ANY_END))


def _is_ours(request: web.Request, name: str) -> bool:
    orchestrator = request.app[ORCHESTRATOR]
    return name in orchestrator.models.by_name() or name in orchestrator.stages.demand.loadable()
