"""API configuration, derived from the settings; read by handlers and connections."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from orchestrator.api.auth import Key
from orchestrator.parsing import FormatConfig
from worker.protocol import Grammar

ANY = "*"
"""Stands for any host, or any origin."""


@dataclass(frozen=True, slots=True)
class BodyConfig:
    """Bounds on request bodies: bytes of one, of all together, and seconds to arrive."""

    max_bytes: int
    all_bytes: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class BrowserConfig:
    """Hosts and web origins that are ours, or may use the service."""

    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    cors_credentials: bool = False


@dataclass(frozen=True, slots=True)
class ConnectionConfig:
    """Bounds on connections: how many there may be, and how many seconds they may be silent."""

    max_connections: int
    header_timeout_s: float
    idle_timeout_s: float


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """How slow a client that reads a stream may be."""

    backlog_bytes: int
    timeout_s: float
    kernel_bytes: int = 2**15
    """Largest part of the backlog that the kernel may hold; by default it takes megabytes."""
    keepalive_s: float | None = None
    """A comment is sent before a stream has been silent for longer; None: never."""
    behind_s: float = 0.5
    """A client is behind once something has waited for it for this long."""
    metrics_every_s: float = 0.0
    """Shortest time between two ``metrics`` events of a task; 0: none are sent."""


@dataclass(frozen=True, slots=True)
class ResponseStoreConfig:
    """Bounds on the kept responses that clients may go on from."""

    max_responses: int
    max_age_s: float
    max_bytes: int


@dataclass(frozen=True, slots=True)
class GrammarConfig:
    """Rules for JSON that apply in addition to its schema."""

    open_objects: bool = False
    """Whether objects may have properties that their schema does not name."""
    spaced: bool = False
    """Whether JSON may have white space between its tokens."""

    def of(self, grammar: Grammar) -> Grammar:
        """A client's grammar with these rules added."""
        if not (self.open_objects or self.spaced):
            return grammar
        return msgspec.structs.replace(grammar, open_objects=self.open_objects, spaced=self.spaced)


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """Configuration of the whole API. Without ``keys`` everybody is let in."""

    keys: tuple[Key, ...]
    bodies: BodyConfig
    browsers: BrowserConfig
    connections: ConnectionConfig
    streams: StreamConfig
    responses: ResponseStoreConfig
    formats: FormatConfig
    """Formats in which models write tool calls and their thinking."""
    grammars: GrammarConfig = GrammarConfig()
    strict_fields: bool = False
    """Whether unknown fields are refused in every dialect."""
    model_aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names for models; one that ends with ``*`` stands for all that begin like it."""
    vllm_metrics: bool = False
    """Whether ``/metrics`` also has some metrics under vLLM's names."""
    batch_objectives: frozenset[str] = frozenset()
    """Values of a gateway's objective header that mean batch work."""


CONFIG = web.AppKey("config", ApiConfig)
