"""The dialects that this service serves. docs/extending.md explains how to add one."""

from dataclasses import dataclass
from types import ModuleType
from typing import Final

from orchestrator.api.anthropic import routes as anthropic
from orchestrator.api.anthropic.shapes import ANTHROPIC
from orchestrator.api.http.context import Dialect
from orchestrator.api.native import quotes
from orchestrator.api.native import routes as native
from orchestrator.api.native.events import NATIVE
from orchestrator.api.openai import routes as openai
from orchestrator.api.openai.shapes import OPENAI


@dataclass(frozen=True, slots=True)
class ServedDialect:
    """A dialect: its conventions, and the modules with its ``routes()``."""

    conventions: Dialect
    edges: tuple[ModuleType, ...]


SERVED: Final = [
    ServedDialect(ANTHROPIC, (anthropic,)),
    ServedDialect(OPENAI, (openai,)),
    ServedDialect(NATIVE, (native, quotes)),
]
"""A path belongs to the first dialect that serves it, otherwise to the last dialect."""
