"""The dialects that this service serves. docs/extending.md explains how to add one."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from aiohttp import web

from orchestrator.api.anthropic import routes as anthropic
from orchestrator.api.anthropic.shapes import ANTHROPIC
from orchestrator.api.http.context import Dialect
from orchestrator.api.native import quotes
from orchestrator.api.native import routes as native
from orchestrator.api.native.events import NATIVE
from orchestrator.api.openai import routes as openai
from orchestrator.api.openai.shapes import OPENAI


class Edge(Protocol):
    def routes(self) -> Sequence[web.RouteDef]: ...


@dataclass(frozen=True, slots=True)
class ServedDialect:
    """A dialect: its conventions, and the modules with its routes."""

    conventions: Dialect
    edges: tuple[Edge, ...]


SERVED: Final = [
    ServedDialect(ANTHROPIC, (anthropic,)),
    ServedDialect(OPENAI, (openai,)),
    ServedDialect(NATIVE, (native, quotes)),
]
"""A path belongs to the first dialect that serves it, otherwise to the last dialect."""
