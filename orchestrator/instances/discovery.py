"""Discovers the Triton instances, which may change while the service runs.

Each source of addresses is read repeatedly. A source that cannot answer raises ``SourceError``, and
its last answer is kept: an old list of instances is better than none.

An instance that no source lists any more is retired: it gets no new work, its running jobs may
finish within a grace period, then its lanes close and it is removed. An idle instance is removed
after a few more answers without it, because DNS answers flap. If it is listed again before that, it
stays.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final, Protocol

from orchestrator.clock import Clock
from orchestrator.errors import InvalidRequest
from orchestrator.instances.addresses import DNS_PREFIX, check_address
from orchestrator.lanes.endpoint import is_url, name_of, read_endpoint
from orchestrator.telemetry.log import fields, lane_log

LEAVE_GRACE_S: Final = 30.0
"""Seconds that jobs may keep running on an instance that is no longer listed."""
LINGER_S: Final = 6.0
"""Seconds for which an idle instance must be unlisted before its lanes close: a few DNS answers."""
READ_EVERY_S: Final = 2.0
"""Seconds between two readings of a source."""
ANSWER_S = 10.0
"""Seconds after which a resolver without an answer counts as failed."""


class SourceError(Exception):
    """A source gave no usable list; the message says why."""


Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Returns the numeric addresses of a host name; raises ``OSError``."""


async def resolve(host: str, port: int) -> list[str]:
    """All A and AAAA records of a host from the system's resolver. Raises ``OSError``."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


class DnsName:
    """All addresses of one name, such as a headless service in Kubernetes."""

    def __init__(self, entry: str, resolver: Resolve = resolve) -> None:
        self.name = entry
        host, _, port = entry.removeprefix(DNS_PREFIX).rpartition(":")
        self._host = host.strip("[]")
        self._port = int(port)
        self._resolver = resolver
        self._asking: asyncio.Future[list[str]] | None = None
        """An unfinished lookup. No second one starts: each holds one of the loop's few threads."""

    async def read(self) -> frozenset[str]:
        if self._asking is None:
            self._asking = asyncio.ensure_future(self._resolver(self._host, self._port))
        done, _ = await asyncio.wait([self._asking], timeout=ANSWER_S)
        if not done:
            raise SourceError(f"{self._host} cannot be resolved: no answer in {ANSWER_S:g} s")
        asked, self._asking = self._asking, None
        try:
            hosts = asked.result()
        except OSError as error:
            raise SourceError(f"{self._host} cannot be resolved: {error.strerror}") from None
        if not hosts:
            raise SourceError(f"{self._host} has no address")
        return frozenset(
            f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}" for host in hosts
        )


MAX_REGISTRATIONS = 256
"""Maximum number of registrations."""
MIN_TTL_S = 1.0
MAX_TTL_S = 3600.0


class RegisteredInstances:
    """A source of addresses that a pool manager registers repeatedly for a limited time (PV-1). An
    expired registration does not remove an instance that serves, because its lanes know its state
    better than a silent manager. It ends when the instance is also not ready."""

    name = "registered"

    def __init__(self, clock: Clock, is_ready: Callable[[str], bool]) -> None:
        self._clock = clock
        self._is_ready = is_ready
        self._ends_at: dict[str, float] = {}

    def register(self, address: str, ttl_s: float) -> bool:
        """Register or renew an instance for ``ttl_s`` seconds; returns whether it is new. Raises
        ``InvalidRequest``."""
        try:
            check_address(address)
            # Otherwise a registration could send a local file to any host.
            if is_url(address) and read_endpoint(address).key_file is not None:
                raise ValueError("key_file is only for TIDEGATE_INSTANCES")
            taken = self._entry_of(name_of(address))
            if taken is not None and taken != address:
                raise ValueError(f"{name_of(address)} is registered with another URL; take it off")
        except ValueError as error:
            raise InvalidRequest(f"address: {error}", field="address") from None
        if not MIN_TTL_S <= ttl_s <= MAX_TTL_S:  # which no NaN is
            raise InvalidRequest(
                f"ttl_s: must be from {MIN_TTL_S:g} to {MAX_TTL_S:g}, got {ttl_s:g}", field="ttl_s"
            )
        is_new = address not in self._ends_at
        if is_new and len(self._ends_at) >= MAX_REGISTRATIONS:
            self._expire()
            if len(self._ends_at) >= MAX_REGISTRATIONS:
                raise InvalidRequest(
                    f"address: {MAX_REGISTRATIONS} instances are registered, and there can be no "
                    "more; deregister one, or list them in TIDEGATE_INSTANCES",
                    field="address",
                )
        self._ends_at[address] = self._clock.now() + ttl_s
        return is_new

    def deregister(self, address: str) -> bool:
        """Remove an instance by URL or name. Returns whether it was registered. Idempotent."""
        entry = address if address in self._ends_at else self._entry_of(address)
        return entry is not None and self._ends_at.pop(entry, None) is not None

    def _entry_of(self, name: str) -> str | None:
        return next((entry for entry in self._ends_at if name_of(entry) == name), None)

    async def read(self) -> frozenset[str]:
        self._expire()
        return frozenset(self._ends_at)

    def _expire(self) -> None:
        now = self._clock.now()
        for address, ends_at in list(self._ends_at.items()):
            if ends_at <= now and not self._is_ready(address):
                del self._ends_at[address]


Source = DnsName | RegisteredInstances
"""A source of addresses that may change. ``read`` returns all present addresses, or raises
``SourceError``."""


class InstanceSet(Protocol):
    """The part of the registry that discovery drives; the picker has another one."""

    def addresses(self) -> dict[str, float | None]:
        """Each instance with the time when it began to retire, in seconds of the clock, or None."""

    def idle(self, address: str) -> bool:
        """Whether an instance has none of our jobs."""

    def ready(self, address: str) -> bool:
        """Whether an instance exists and takes work."""

    def add(self, address: str) -> None: ...
    def retire(self, address: str) -> None: ...
    async def remove(self, address: str) -> None: ...


class DiscoverySync:
    """Follows all sources. ``listed``: the addresses in the settings themselves."""

    def __init__(
        self,
        instances: InstanceSet,
        listed: Iterable[str],
        sources: Sequence[Source],
        clock: Clock,
    ) -> None:
        self._instances = instances
        self.registered = RegisteredInstances(clock, instances.ready)
        self._listed = frozenset(listed)
        self._sources = (*sources, self.registered)
        self._clock = clock
        self._known: dict[str, frozenset[str]] = {}
        self.errors: dict[str, str] = {}
        """Why each unusable source is unusable, by name."""
        self._following: list[asyncio.Task[None]] = []

    def list_anew(self, listed: Iterable[str]) -> None:
        """Replace the listed addresses: add new instances, retire removed ones."""
        self._listed = frozenset(listed)
        self._apply()

    def start(self) -> None:
        self._following = [asyncio.create_task(self._follow(source)) for source in self._sources]

    async def close(self) -> None:
        for task in self._following:
            task.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)
        self._following = []

    async def read(self, source: Source) -> None:
        """Read one source, then add and retire instances accordingly."""
        try:
            addresses = await source.read()
        except SourceError as error:
            # Log the same error only once.
            reason = str(error)
            level = logging.DEBUG if self.errors.get(source.name) == reason else logging.WARNING
            self.errors[source.name] = reason
            what = "instance source unusable, keeping its last list: %s"
            lane_log.log(level, what, reason, extra=fields(source=source.name))
            return
        if self.errors.pop(source.name, None) is not None:
            lane_log.info("instance source is readable again", extra=fields(source=source.name))
        if addresses != self._known.get(source.name):
            self._known[source.name] = addresses
            self._apply()

    async def remove_retired(self) -> None:
        """Remove retired instances that are idle or whose grace has ended. One call at a time."""
        now = self._clock.now()
        over = [
            address
            for address, since in self._instances.addresses().items()
            if since is not None
            and now - since >= (LINGER_S if self._instances.idle(address) else LEAVE_GRACE_S)
        ]
        for address in over:
            await self._instances.remove(address)
        if over:
            self._apply()  # one may be listed again since its lanes closed

    async def _follow(self, source: Source) -> None:
        while True:
            try:
                await self.read(source)
            except Exception:
                lane_log.exception(
                    "instance source failed unexpectedly; will retry",
                    extra=fields(source=source.name),
                )
            await asyncio.sleep(READ_EVERY_S)

    def _apply(self) -> None:
        wanted = self._listed.union(*self._known.values())
        present = self._instances.addresses()
        for address in sorted(wanted):
            if address not in present or present[address] is not None:
                self._instances.add(address)
        for address, since in present.items():
            if address not in wanted and since is None:
                self._instances.retire(address)
