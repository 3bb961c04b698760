"""Connections to the shared store, and the names of its keys."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import urlsplit

import redis
import redis.asyncio
from redis.backoff import NoBackoff
from redis.retry import Retry

from orchestrator.tasks.journal.store import JournalTerms
from orchestrator.telemetry.log import fields, service_log

TIMEOUT_S = 2.0
"""Longest wait in seconds for an answer of the store or a connection to it."""
PATIENCE_S = 0.5
"""Longest wait in seconds for the store if a request can continue without it."""
MIN_VERSION = (6, 2)
LEASE_S: Final = 5.0
"""Seconds of silence after which an orchestrator counts as dead. The others then take over its
durable tasks."""
LAYOUT = b"2"
"""Version of the keys' layout. Orchestrators with different layouts must not share a prefix."""

FAILURES = (redis.RedisError, OSError)


class StateError(redis.RedisError):
    """The store cannot be used in its current state. The message has the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class StateConfig:
    url: str = field(repr=False)
    """``redis://user:password@host:port/db``, ``rediss://`` with TLS, or ``unix://path``."""
    prefix: str
    """Prefix of all key names, the same for all orchestrators that share a state."""
    lease_s: float = LEASE_S
    terms: JournalTerms = field(default_factory=JournalTerms)

    @property
    def where(self) -> str:
        parts = urlsplit(self.url)
        if parts.scheme == "unix":
            return f"unix://{parts.path}"
        return f"{parts.scheme}://{parts.hostname or ''}:{parts.port or 6379}{parts.path}"


class Names:
    """Names of keys. All have the same hash tag, so that a cluster keeps them on one node."""

    def __init__(self, prefix: str) -> None:
        self.prefix = f"{{{prefix}}}:"
        self.layout = f"{self.prefix}layout"
        self.members = f"{self.prefix}members"
        self.cordons = f"{self.prefix}cordons"
        self.runs = f"{self.prefix}runs"
        self.room = f"{self.prefix}room"
        """Written from time to time, to check whether the store accepts writes."""

    def alive(self, tag: str) -> str:
        """Key of an orchestrator's lease, by tag. It expires if it is not renewed."""
        return f"{self.prefix}alive:{tag}"

    def held(self, tag: str) -> str:
        return f"{self.prefix}held:{tag}"

    def task(self, task_id: str) -> str:
        return f"{self.prefix}task:{task_id}"

    def tokens(self, task_id: str) -> str:
        return f"{self.prefix}tokens:{task_id}"

    def result(self, task_id: str) -> str:
        return f"{self.prefix}result:{task_id}"

    def item(self, digits: str) -> str:
        """Key of the copy of a client's session, response or conversation."""
        return f"{self.prefix}item:{digits}"

    def sum(self, name: str) -> str:
        """Key of a sum: the parts of all orchestrators."""
        return f"{self.prefix}sum:{name}"

    def page(self, name: str) -> str:
        """Key of a page of lines of all orchestrators."""
        return f"{self.prefix}page:{name}"

    def demands_of(self, address: str) -> str:
        """Key of an instance's demands: each orchestrator's jobs that are there or would be."""
        return f"{self.prefix}demands:{address}"

    def submission(self, key: str, idempotency_key: str | None) -> str:
        return f"{self.prefix}submission:{key}:{idempotency_key or ''}"


def connect(config: StateConfig) -> "redis.Redis":
    """A connection for one thread. Nothing is sent yet."""
    return redis.Redis.from_url(config.url, **_options())


def connect_async(config: StateConfig) -> "redis.asyncio.Redis":
    """Connections for the event loop. Nothing is sent yet."""
    return redis.asyncio.Redis.from_url(config.url, **_options())


def _options() -> dict[str, Any]:
    # No retries: the callers have their own. Without ``driver_info`` each connection reads the
    # library's version from disk.
    limits = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S}
    return {**limits, "retry": Retry(NoBackoff(), 0), "driver_info": None}


def check(client: "redis.Redis", names: Names) -> None:
    """Check that the store is reliable, and claim the prefix for this layout. Raises
    ``StateError``, or one of ``FAILURES`` if the store does not answer."""
    require_version(client.info("server"))
    layout: Any = client.get(names.layout)
    if layout is None:  # do not rewrite it: a full store refuses that too
        client.set(names.layout, LAYOUT, nx=True)
        layout = client.get(names.layout)
    require_layout(layout, names)
    _warn_of_risks(client)


def require_version(server: Mapping[str, Any]) -> None:
    """Raise ``StateError`` if the store is too old. ``server`` is the store's report."""
    version = str(server.get("valkey_version") or server["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        raise StateError(
            f"the store has version {version}, and at least {'.'.join(map(str, MIN_VERSION))} is "
            "required: upgrade the store"
        )


def require_layout(layout: bytes | None, names: Names) -> None:
    """Raise ``StateError`` if orchestrators of another version use the same prefix."""
    if layout not in (None, LAYOUT):
        raise StateError(
            f"the data under {names.prefix!r} has layout {layout!r}, but this Tidegate expects "
            f"{LAYOUT!r}: run orchestrators of one version, or set another TIDEGATE_STATE__PREFIX"
        )


def _warn_of_risks(client: "redis.Redis") -> None:
    memory = client.info("memory")
    if memory.get("maxmemory") and memory.get("maxmemory_policy") != "noeviction":
        service_log.warning(
            "the store may drop durable tasks when its memory is full: set maxmemory-policy "
            "noeviction",
            extra=fields(maxmemory_policy=memory.get("maxmemory_policy")),
        )
    if not client.info("persistence").get("aof_enabled"):
        service_log.warning(
            "the store does not write changes to disk, so durable tasks are lost if it stops: "
            "set appendonly yes"
        )


def describe_error(error: Exception) -> str:
    """A description of a store error for clients, without addresses."""
    if isinstance(error, StateError):
        return str(error)
    if isinstance(error, redis.AuthenticationError | redis.exceptions.NoPermissionError):
        return "the store refuses the user or password in TIDEGATE_STATE__URL"
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return "the store's memory is full"
    if isinstance(error, redis.exceptions.ReadOnlyError):
        return "the store is a replica and does not accept writes"
    if "MISCONF" in str(error):
        return "the store does not accept writes, because it cannot write to its disk"
    if "WRONGTYPE" in str(error):
        return "the store has other data under TIDEGATE_STATE__PREFIX: set another one"
    if isinstance(error, redis.TimeoutError):
        return f"the store did not answer within {TIMEOUT_S:g} s"
    if isinstance(error, redis.ConnectionError | OSError):
        return "the store cannot be reached"
    return f"the store answered with an error ({type(error).__name__})"
