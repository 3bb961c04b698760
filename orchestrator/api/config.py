"""API configuration, derived from the settings. Handlers and connections read it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from aiohttp import web

from orchestrator.api.auth import Key
from orchestrator.parsing.formats import FormatConfig
from orchestrator.settings.sections import HttpSettings

ANY = "*"
"""Stands for any host, or any origin."""


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """Configuration of the whole API. Without ``keys``, every client is accepted."""

    keys: tuple[Key, ...]
    http: HttpSettings
    keepalive_s: float
    """Longest time without an event before a stream sends a comment, in seconds; 0: no limit."""
    formats: FormatConfig
    """Formats of the models' tool calls and thinking."""
    model_aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names for models. A name that ends with ``*`` is a prefix."""


CONFIG = web.AppKey("config", ApiConfig)


try:
    VERSION = version("tidegate")
except PackageNotFoundError:  # runs from a source tree
    VERSION = "0"
