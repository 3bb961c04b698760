"""API configuration, derived from the settings; read by handlers and connections."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version

from aiohttp import web

from orchestrator.api.auth import Key
from orchestrator.parsing import FormatConfig
from orchestrator.settings import HttpSettings

ANY = "*"
"""Stands for any host, or any origin."""


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """Configuration of the whole API. Without ``keys`` every client is accepted."""

    keys: tuple[Key, ...]
    http: HttpSettings
    keepalive_s: float
    """Longest silence of an event stream, in seconds; 0: no limit."""
    formats: FormatConfig
    """Formats in which models write tool calls and their thinking."""
    model_aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names for models; one that ends with ``*`` is a prefix."""


CONFIG = web.AppKey("config", ApiConfig)


def _installed() -> str:
    try:
        return version("tidegate")
    except PackageNotFoundError:  # run from a tree that is not installed
        return "0"


VERSION = _installed()
