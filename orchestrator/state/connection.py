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
"""Longest wait for the store, in seconds, for one answer or one connection."""
PATIENCE_S = 0.5
"""Longest wait for the store, in seconds, where a request can do without it."""
MIN_VERSION = (6, 2)
LEASE_S: Final = 5.0
"""Seconds of silence after which an orchestrator counts as dead, and the others take over its
durable tasks."""
LAYOUT = b"2"
"""Version of the keys' layout. Orchestrators of different layouts must not share a prefix."""

FAILURES = (redis.RedisError, OSError)


class StateError(redis.RedisError):
    """The store cannot be used as it is; the message says why, and what to do."""


@dataclass(frozen=True, slots=True)
class StateConfig:
    """Settings of the shared store."""

    url: str = field(repr=False)
    """``redis://user:password@host:port/db``, ``rediss://`` with TLS, or ``unix://path``."""
    prefix: str
    """What the names of all keys begin with: one for all
    orchestrators that share a state."""
    lease_s: float = LEASE_S
    terms: JournalTerms = field(default_factory=JournalTerms)

    @property
    def where(self) -> str:
        parts = urlsplit(self.url)
        if parts.scheme == "unix":
            return f"unix://{parts.path}"
        return f"{parts.scheme}://{parts.hostname or ''}:{parts.port or 6379}{parts.path}"


class Names:
    """Names of keys. All have one hash tag, so that a cluster keeps them on one node."""

    def __init__(self, prefix: str) -> None:
        self.prefix = f"{{{prefix}}}:"
        self.layout = f"{self.prefix}layout"
        self.members = f"{self.prefix}members"
        self.changed = f"{self.prefix}changed"
        """Stands for the latest change of a member."""
        self.cordons = f"{self.prefix}cordons"
        self.runs = f"{self.prefix}runs"
        self.room = f"{self.prefix}room"
        """Written now and then, to see whether the store takes anything more."""

    def alive(self, tag: str) -> str:
        """Key of the lease of the orchestrator with that tag; it expires when it is not renewed."""
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
        """The copy of what a client keeps: a session, a response, a conversation."""
        return f"{self.prefix}item:{digits}"

    def sum(self, name: str) -> str:
        """Each orchestrator's part of a sum."""
        return f"{self.prefix}sum:{name}"

    def page(self, name: str) -> str:
        """Lines that all orchestrators have together."""
        return f"{self.prefix}page:{name}"

    def demands_of(self, address: str) -> str:
        """Each orchestrator's jobs on an instance, or those that it would send there."""
        return f"{self.prefix}demands:{address}"

    def submission(self, key: str, idempotency_key: str | None) -> str:
        """The task of a client's own name for a submission."""
        return f"{self.prefix}submission:{key}:{idempotency_key or ''}"


def connect(config: StateConfig) -> "redis.Redis":
    """A connection for one thread. Nothing is sent yet."""
    return redis.Redis.from_url(config.url, **_options())


def connect_async(config: StateConfig) -> "redis.asyncio.Redis":
    """Connections for the event loop. Nothing is sent yet."""
    return redis.asyncio.Redis.from_url(config.url, **_options())


def _options() -> dict[str, Any]:
    # Callers retry in their own way.
    return {
        "socket_timeout": TIMEOUT_S,
        "socket_connect_timeout": TIMEOUT_S,
        "retry": Retry(NoBackoff(), 0),
        # Else each connection looks the library's version up on the disk.
        "driver_info": None,
    }


def check(client: "redis.Redis", names: Names) -> None:
    """Check that the store can keep a promise, and claim the prefix for this layout. Raises
    ``StateError``, or one of ``FAILURES`` where it does not answer."""
    require_version(client.info("server"))
    layout: Any = client.get(names.layout)
    if layout is None:  # a full store refuses even to rewrite a value
        client.set(names.layout, LAYOUT, nx=True)
        layout = client.get(names.layout)
    require_layout(layout, names)
    _warn_of_risks(client)


def require_version(server: Mapping[str, Any]) -> None:
    """Raise ``StateError`` for a store that is too old; ``server`` is its own report."""
    version = str(server.get("valkey_version") or server["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        raise StateError(
            f"the store is of version {version}, and {'.'.join(map(str, MIN_VERSION))} is the "
            "least that will do: upgrade it"
        )


def require_layout(layout: bytes | None, names: Names) -> None:
    """Raise ``StateError`` where orchestrators of another version use the same prefix."""
    if layout not in (None, LAYOUT):
        raise StateError(
            f"what is under {names.prefix!r} has layout {layout!r}, and this Tidegate knows "
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
            "the store writes nothing to a disk as it comes, so durable tasks are lost with it: "
            "set appendonly yes"
        )


def describe_error(error: Exception) -> str:
    """A description of an error of the store, for clients: without addresses."""
    if isinstance(error, StateError):
        return str(error)
    if isinstance(error, redis.AuthenticationError | redis.exceptions.NoPermissionError):
        return "the store refuses this user or password (TIDEGATE_STATE__URL)"
    if isinstance(error, redis.exceptions.OutOfMemoryError):
        return "the store's memory is full"
    if isinstance(error, redis.exceptions.ReadOnlyError):
        return "the store is a replica, which takes no writes"
    if "MISCONF" in str(error):
        return "the store takes no writes, because it cannot write to its disk"
    if isinstance(error, redis.TimeoutError):
        return f"the store has not answered within {TIMEOUT_S:g} s"
    if isinstance(error, redis.ConnectionError | OSError):
        return "the store cannot be reached"
    return f"the store answered with an error ({type(error).__name__})"
