"""The dialects that this service serves. docs/extending.md explains how to add one."""

from collections.abc import Iterable
from typing import Final, NamedTuple

from aiohttp import web

from orchestrator.api.anthropic import routes as anthropic
from orchestrator.api.anthropic.shapes import ANTHROPIC
from orchestrator.api.http.context import Dialect
from orchestrator.api.native import quotes
from orchestrator.api.native import routes as native
from orchestrator.api.native.events import NATIVE
from orchestrator.api.openai import routes as openai
from orchestrator.api.openai.shapes import OPENAI


class ServedDialect(NamedTuple):
    conventions: Dialect
    routes: Iterable[web.RouteDef]


SERVED: Final = [
    ServedDialect(ANTHROPIC, anthropic.routes()),
    ServedDialect(OPENAI, openai.routes()),
    ServedDialect(NATIVE, [*native.routes(), *quotes.routes()]),
]
"""A path belongs to the first dialect that serves it, otherwise to the last dialect."""
