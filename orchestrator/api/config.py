"""What an operator may set of the API; built of the settings, read by handlers and connections."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from aiohttp import web

from orchestrator.api.auth import Key
from orchestrator.parsing import FormatConfig
from worker.protocol import Grammar

ANY = "*"
"""Any host, or any origin."""


@dataclass(frozen=True, slots=True)
class BodyConfig:
    """How much may arrive, and how long it may take."""

    max_bytes: int
    all_bytes: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class BrowserConfig:
    """Which hosts and origins are ours, or are welcome."""

    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    cors_credentials: bool = False


@dataclass(frozen=True, slots=True)
class ConnectionConfig:
    """How many connections there may be, and how long they may say nothing."""

    max_connections: int
    header_timeout_s: float
    idle_timeout_s: float


@dataclass(frozen=True, slots=True)
class StreamConfig:
    """How slow a client may be."""

    backlog_bytes: int
    timeout_s: float
    kernel_bytes: int = 2**15
    """Of the backlog, what the kernel may hold: left to itself it takes megabytes."""
    keepalive_s: float | None = None
    """A comment is sent before a stream has been silent for longer; None: never."""
    behind_s: float = 0.5
    """A client is behind once something has waited for it for so long."""
    metrics_every_s: float = 0.0
    """A task's events have one of ``metrics`` this often at most; 0: never."""


@dataclass(frozen=True, slots=True)
class ResponseStoreConfig:
    """How much is kept of responses that clients may go on from."""

    max_responses: int
    max_age_s: float
    max_bytes: int


@dataclass(frozen=True, slots=True)
class GrammarConfig:
    """What JSON is held to that a schema does not say."""

    open_objects: bool = False
    """Objects may have properties that their schema does not name."""
    spaced: bool = False
    """JSON may have white space between its tokens."""

    def of(self, grammar: Grammar) -> Grammar:
        """What a client states, held to that."""
        if not (self.open_objects or self.spaced):
            return grammar
        return msgspec.structs.replace(grammar, open_objects=self.open_objects, spaced=self.spaced)


@dataclass(frozen=True, slots=True)
class ApiConfig:
    """All of it. Without ``keys`` everybody is let in."""

    keys: tuple[Key, ...]
    bodies: BodyConfig
    browsers: BrowserConfig
    connections: ConnectionConfig
    streams: StreamConfig
    responses: ResponseStoreConfig
    formats: FormatConfig
    """In which models write tool calls and what they think."""
    grammars: GrammarConfig = GrammarConfig()
    strict_fields: bool = False
    """Fields that nobody here knows are refused in every dialect."""
    model_aliases: Mapping[str, str] = field(default_factory=dict)
    """Other names of models; one that ends with ``*`` stands for all that begin so."""
    vllm_metrics: bool = False
    """``/metrics`` has some under vLLM's names too."""
    batch_objectives: frozenset[str] = frozenset()
    """Of what a gateway calls a request's objective, what means batch work."""


CONFIG = web.AppKey("config", ApiConfig)
