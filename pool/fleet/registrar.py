"""Tells orchestrators which instances are ready, and repeats it.

An orchestrator gets each instance repeatedly, with a time to live. So a restarted one knows all
instances within that time. An unreachable one is retried without delaying the others.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from urllib.parse import quote

import aiohttp

from catalog.operator_key import access
from pool.events import EventKind, PoolEvent, pool_log
from pool.supervise import cancelled

RENEWALS = 3
"""Renewals within a registration's time to live: it survives two failed ones."""
_TTL_S = (1.0, 3600.0)
"""Shortest and longest time to live that orchestrators accept (``discovery.registered``)."""
_RETRY_S = 2.0
_ANSWER_S = 5.0
_ERROR_CHARS = 200
_NO_KEY = "; start the manager with this orchestrator's admin key (docs/pool.md says where)"


class CannotTell(Exception):
    """An orchestrator refuses an update; the message says why."""


class Target:
    """One orchestrator, kept up to date with ``POST`` and ``DELETE /v2/instances``."""

    def __init__(
        self, name: str, key: str, ttl_s: float, url: Callable[[], str] | None = None
    ) -> None:
        """Without a ``key``, uses the key that an orchestrator keeps on this machine. ``url``
        returns its URL, empty while it cannot be updated; without it, ``name`` is the URL."""
        self.name = name
        self._url = url
        self._key = key
        self._renew_s = min(ttl_s, _TTL_S[1]) / RENEWALS
        self._ttl_s = max(_TTL_S[0], min(ttl_s, _TTL_S[1]))
        self._http: aiohttp.ClientSession | None = None
        self._wanted: frozenset[str] = frozenset()
        self._told: set[str] = set()
        self._changed = asyncio.Event()
        self.is_told = asyncio.Event()
        self._updates: asyncio.Task[None] | None = None

    def start(self, said: Callable[[str, str], None]) -> None:
        """Begin the updates. ``said`` gets the name and the problem of each, "" for none."""
        self._updates = asyncio.create_task(self._update(said), name=f"tell {self.name}")

    def set(self, addresses: frozenset[str]) -> None:
        """Have these addresses registered and no others, even if they are the same as before."""
        self._wanted = addresses
        self.is_told.clear()
        self._changed.set()

    async def close(self) -> None:
        if self._updates is not None:
            await cancelled(self._updates)
        if self._http is not None:
            await self._http.close()

    async def _update(self, said: Callable[[str, str], None]) -> None:
        pause_s: float | None = None
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await self._changed.wait()
            self._changed.clear()
            wanted, problem = self._wanted, ""
            try:
                await self._tell(wanted)
            except CannotTell as error:
                problem = str(error)
            except Exception as error:  # a bug here must not stop the updates
                pool_log.exception("cannot update an orchestrator; retrying")
                problem = f"{type(error).__name__}: {error}"
            said(self.name, problem)
            pause_s = _RETRY_S if problem else self._renew_s
            if not problem and wanted == self._wanted:
                self.is_told.set()

    async def _tell(self, addresses: frozenset[str]) -> None:
        """Register these addresses, and remove others that were registered here. Raises
        ``CannotTell``."""
        url = self.name if self._url is None else self._url()
        if not url:
            return
        if self._http is None:
            timeout = aiohttp.ClientTimeout(total=_ANSWER_S)
            self._http = aiohttp.ClientSession(timeout=timeout)
        http = self._http
        # Read it each time: a restarted orchestrator may have a new key.
        key = self._key
        if not key:
            url, key = await asyncio.to_thread(access, url)
        url, headers = f"{url}/v2/instances", {"Authorization": f"Bearer {key}"} if key else {}
        for address in sorted(self._told - addresses):
            await self._ask(http.delete(f"{url}/{quote(address, safe='')}", headers=headers))
            self._told.discard(address)
        for address in sorted(addresses):
            body = {"address": address, "ttl_s": self._ttl_s}
            self._told.add(address)  # before the answer, which may be lost
            await self._ask(http.post(url, json=body, headers=headers))

    async def _ask(self, request: "aiohttp.client._RequestContextManager") -> None:
        try:
            async with request as response:
                if response.status >= 300:
                    said = _printable(await response.content.read(4 * _ERROR_CHARS))
                    remedy = _NO_KEY if response.status in (401, 403) else ""
                    raise CannotTell(f"HTTP {response.status}: {said}{remedy}")
        except (aiohttp.ClientError, TimeoutError) as error:
            raise CannotTell(str(error) or type(error).__name__) from None


def _printable(body: bytes) -> str:
    """A server's answer as one line for a log, whatever its encoding."""
    text = " ".join(body.decode(errors="replace").split())
    return "".join(each for each in text if each.isprintable())[:_ERROR_CHARS]


class Registrar:
    """All targets."""

    def __init__(self, emit: Callable[[PoolEvent], None]) -> None:
        """``emit`` gets an event for a target that cannot be updated, once per outage."""
        self.errors: dict[str, str] = {}
        """Current errors, by target."""
        self._emit = emit
        self._ready: frozenset[str] = frozenset()
        self._targets: dict[str, Target] = {}

    async def follow(self, targets: Mapping[str, Target]) -> None:
        """Update these targets, by name, and no others. Dropped targets keep their addresses."""
        for name in self._targets.keys() - targets.keys():
            await self._targets.pop(name).close()
            self.errors.pop(name, None)
        for name in targets.keys() - self._targets.keys():
            target = self._targets[name] = targets[name]
            target.set(self._ready)
            target.start(self._said)

    def set_ready(self, addresses: frozenset[str]) -> None:
        """Tell all targets the addresses of the instances that are ready, even if they are the same
        as before: a target may have restarted."""
        self._ready = addresses
        for target in self._targets.values():
            target.set(addresses)

    async def wait_told(self, timeout_s: float) -> None:
        """Wait until all targets are updated, or for ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*(each.is_told.wait() for each in self._targets.values()))

    def _said(self, name: str, reason: str) -> None:
        if not reason:
            self.errors.pop(name, None)
        elif self.errors.get(name) != reason:
            self.errors[name] = reason
            self._emit(PoolEvent(EventKind.UNREGISTERED, name, reason))
