"""The orchestrators of a fleet: each renews a lease, and sees who else does."""

import asyncio
import math
import time
from collections.abc import Callable
from typing import NamedTuple

import msgspec
import redis.asyncio

from orchestrator.state import connection, scripts
from orchestrator.state.connection import StateConfig
from orchestrator.state.tasks import SharedTasks
from orchestrator.telemetry.log import fields, service_log

RENEWALS_PER_LEASE = 5
RENEW_S = 0.25
"""Longest time between two renewals, in seconds, after which all know what each one has to do."""
CLOSE_WAIT_S = 1.0


class Member(msgspec.Struct, frozen=True):
    """An orchestrator, as it describes itself to the others."""

    url: str
    """Where the others reach it."""
    keys: str
    """Digest of the keys that it takes: the same at all members of a fleet."""
    since_unix: float
    demands: dict[str, int] = {}
    """Jobs that it has on each instance, by address, or would send there."""
    group: str = ""
    """Name of the port that it shares with other processes; empty for one that has its own."""
    leads_since: float = 0.0
    """Since when it keeps the files and batches of its group, in seconds of the store's clock; 0:
    it does not."""


class Seen(NamedTuple):
    """Another member, as of the last renewal."""

    member: Member
    is_alive: bool


class Members:
    """One orchestrator's lease, and the other members as it last saw them."""

    def __init__(self, config: StateConfig, tasks: SharedTasks, unix: Callable[[], float]) -> None:
        self.fault = ""
        """Why the store cannot be used; empty while all is well."""
        self.others: dict[str, Seen] = {}
        """The other members by tag, as the store last told."""
        self.renewals = 0
        """How many renewals have begun."""
        self.has_renewed = False
        """Whether the store has answered once."""
        self._back_at = -math.inf
        """When the store came back after it was away, on the machine's own clock."""
        self.on_seen: list[Callable[[], None]] = []
        """Called after each renewal, with what ``others`` has now."""
        self.cordons: dict[str, float | None] = {}
        """Instances that get no new work, by address: when their running work is to be gone, in
        seconds of the store's clock, None for no limit."""
        self.describe: Callable[[], dict[str, int]] = dict
        """Returns this orchestrator's ``demands``."""
        self.group = ""
        """The own ``Member.group``."""
        self.leads_since = 0.0
        """The own ``Member.leads_since``."""
        self._config = config
        self._tasks = tasks
        self._names = tasks.names
        self._unix = unix
        self._client = connection.connect_async(config)
        self._me: Member | None = None
        self._renewing: asyncio.Task[None] | None = None
        self._has_warned = False

    @property
    def url(self) -> str:
        """Where the others reach this orchestrator; empty before it has joined."""
        return "" if self._me is None else self._me.url

    @property
    def client(self) -> "redis.asyncio.Redis":
        """Connections for whoever asks the store on the event loop."""
        return self._client

    @property
    def alive(self) -> int:
        """How many members are alive, with this one."""
        return 1 + sum(seen.is_alive for seen in self.others.values())

    @property
    def was_away_lately(self) -> bool:
        """Whether the store was away until a moment ago, so that members that live may still lack
        their lease."""
        return time.monotonic() - self._back_at < self._config.lease_s

    def start(self, url: str, keys: str) -> None:
        """Join under an address; ``keys`` is a digest of the keys that are taken here."""
        self._me = Member(url, keys, self.store_time(), group=self.group)
        self._renewing = asyncio.create_task(self._renew_for_ever(), name="state lease")

    async def leave(self) -> None:
        """End the lease: what is left is taken on by others at once. Idempotent."""
        renewing, self._renewing = self._renewing, None
        tag, names = self._tasks.tag, self._names
        try:
            async with asyncio.timeout(CLOSE_WAIT_S), self._client:
                if renewing is not None:
                    renewing.cancel()
                    keys = (names.alive(tag), names.held(tag), names.members)
                    await self._client.eval(scripts.LEAVE, 3, *keys, tag)
        except (TimeoutError, *connection.FAILURES) as error:
            service_log.warning(
                "the fleet was not told that this orchestrator leaves: the others find out when "
                "its lease is over",
                extra=fields(error=connection.told(error)),
            )

    async def _renew_for_ever(self) -> None:
        every_s = min(RENEW_S, self._config.lease_s / RENEWALS_PER_LEASE)
        while True:
            try:
                await self._renew()
                self._tell("")
                for call in self.on_seen:
                    call()
            except connection.FAILURES as error:
                self._tell(connection.told(error))
            except Exception:
                service_log.exception("the lease was not renewed; will retry")
            await asyncio.sleep(every_s)

    async def _renew(self) -> None:
        tag, names = self._tasks.tag, self._names
        lease_ms = round(1000 * self._config.lease_s)
        assert self._me is not None
        self.renewals += 1
        me = msgspec.structs.replace(
            self._me, demands=self.describe(), leads_since=self.leads_since
        )
        before = self._unix()
        async with self._client.pipeline(transaction=False) as pipe:
            keys = (names.alive(tag), names.members)
            pipe.eval(scripts.RENEW, 2, *keys, tag, msgspec.json.encode(me), lease_ms)
            pipe.hgetall(names.cordons)
            (seconds, micros, *found), cordons = await pipe.execute()
        self.has_renewed = True
        now = (before + self._unix()) / 2
        self._tasks.skew_s = int(seconds) + int(micros) / 1e6 - now
        self.others = {
            found[at].decode(): Seen(
                msgspec.json.decode(found[at + 1], type=Member), bool(found[at + 2])
            )
            for at in range(0, len(found), 3)
            if found[at].decode() != tag
        }
        self.cordons = {
            address.decode(): msgspec.json.decode(ends, type=float | None)
            for address, ends in cordons.items()
        }
        self._warn_of_strangers()

    def store_time(self) -> float:
        """Now, by the store's clock, in seconds since 1970."""
        return self._unix() + self._tasks.skew_s

    def _warn_of_strangers(self) -> None:
        assert self._me is not None
        others = [s.member for s in self.others.values() if s.is_alive]
        strangers = [one.url for one in others if one.keys != self._me.keys]
        if strangers and not self._has_warned:
            service_log.warning(
                "orchestrators that share a state take different keys: give all of a fleet the "
                "same keys, and each fleet a TIDEGATE_STATE__PREFIX of its own",
                extra=fields(others=", ".join(strangers)),
            )
        self._has_warned = bool(strangers)

    def _tell(self, fault: str) -> None:
        if fault and not self.fault:
            service_log.error(
                "the shared store cannot be used: this orchestrator goes on alone; will retry",
                extra=fields(store=self._config.where, error=fault),
            )
        elif self.fault and not fault:
            service_log.info(
                "the shared store can be used again", extra=fields(store=self._config.where)
            )
            self._back_at = time.monotonic()
        self.fault = fault
