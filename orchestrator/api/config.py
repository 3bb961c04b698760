"""API configuration, derived from the settings; read by handlers and connections."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from orchestrator.api.auth import Key
from orchestrator.parsing import FormatConfig
from orchestrator.retention import Retention
from orchestrator.settings import HttpSettings, StreamSettings, StructuredOutputSettings
from protocol import Grammar

ANY = "*"
"""Stands for any host, or any origin."""


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """Configuration of the whole API. Without ``keys`` everybody is let in."""

    keys: tuple[Key, ...]
    http: HttpSettings
    streams: StreamSettings
    responses: Retention
    """What is kept of answers."""
    formats: FormatConfig
    """Formats in which models write tool calls and their thinking."""
    structured_output: StructuredOutputSettings = field(default_factory=StructuredOutputSettings)
    model_aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names for models; one that ends with ``*`` stands for all that begin like it."""
    vllm_metrics: bool = False
    """Whether ``/metrics`` also has some metrics under vLLM's names."""
    batch_objectives: frozenset[str] = frozenset()
    """Values of a gateway's objective header that mean batch work."""

    def constrained(self, grammar: Grammar) -> Grammar:
        """A client's grammar with the operator's rules added."""
        rules = self.structured_output
        if not (rules.open_objects or rules.white_space):
            return grammar
        return msgspec.structs.replace(
            grammar, open_objects=rules.open_objects, spaced=rules.white_space
        )


CONFIG = web.AppKey("config", ApiConfig)
