"""The orchestrators that share a state. Each renews its lease and reads the others' leases."""

import asyncio
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple, Protocol

import msgspec

from orchestrator.state import connection, scripts
from orchestrator.state.connection import LAYOUT, PATIENCE_S, StateConfig
from orchestrator.state.tasks import SharedTasks
from orchestrator.telemetry.log import fields, service_log

RENEWALS_PER_LEASE = 5
RENEW_S = 0.25
"""Longest time in seconds between two renewals. Each renewal also exchanges the members' work."""
CLOSE_WAIT_S = 1.0


class Member(msgspec.Struct):
    """An orchestrator's description of itself for the others."""

    url: str
    """Address at which the others reach it; empty before it joins."""
    keys: str
    """Digest of the keys that it accepts. All members have the same."""


class SeenMember(NamedTuple):
    member: Member
    is_alive: bool


class Holder(NamedTuple):
    """Address and tag of the orchestrator that has a requested item."""

    url: str
    tag: str


class RenewalPart(Protocol):
    """A part of each renewal, in the same round trip."""

    def ask(self, pipe: Any) -> int:
        """Add commands to the renewal. Returns their number."""

    def receive(self, answers: Sequence[Any]) -> None:
        """Process the commands' answers. The answer to a failed command is its exception."""


class Members:
    """One orchestrator's lease, and the other members at the last renewal."""

    def __init__(self, config: StateConfig, tasks: SharedTasks, unix: Callable[[], float]) -> None:
        self.fault = ""
        self.strangers: list[str] = []
        """Addresses of members that seem to belong to another service."""
        self.others: dict[str, SeenMember] = {}
        self.renewals = 0
        self.prompt_renewal = 0
        """Number of the last renewal that was answered within ``PATIENCE_S``."""
        self.has_renewed = False
        self._renewed_at = math.inf
        """Start of the last answered renewal, on the machine's own clock."""
        self._back_at = -math.inf
        """Time of the store's return after an outage, on the machine's own clock."""
        self.on_seen: list[Callable[[], None]] = []
        """Called after each renewal, when ``others`` is current."""
        self.on_lapsed: list[Callable[[], None]] = []
        """Called after a renewal that found the lease expired or lost: another orchestrator may
        have taken this one's items in the store."""
        self.parts: list[RenewalPart] = []
        self.cordons: dict[str, float | None] = {}
        """Instances that get no new work, by address, with the time when their running work must
        have ended, in seconds of the store's clock; None for no limit."""
        self.me = Member("", "")
        self.tag = tasks.tag
        self.names = tasks.names
        self.client = connection.connect_async(config)
        self._config = config
        self._tasks = tasks
        self._unix = unix
        self._renewing: asyncio.Task[None] | None = None
        self._watched: dict[Callable[[], None], str] = {}
        self._were_gone: set[str] = set()
        self._is_checked = False
        """Whether the store's version was checked since its last outage."""

    @property
    def alive(self) -> int:
        return 1 + sum(seen.is_alive for seen in self.others.values())

    @property
    def was_away_lately(self) -> bool:
        """Whether an outage of the store ended a moment ago, so that live members may not have
        renewed their leases yet."""
        return time.monotonic() - self._back_at < self._config.lease_s

    def start(self, url: str, keys: str) -> None:
        """Join with the address ``url``. ``keys`` is a digest of the keys accepted here."""
        self.me.url, self.me.keys = url, keys
        self._renewing = asyncio.create_task(self._renew_for_ever(), name="state lease")

    async def leave(self) -> None:
        """End the lease, so that others take over remaining tasks at once. Idempotent."""
        renewing, self._renewing = self._renewing, None
        tag, names = self.tag, self.names
        try:
            async with asyncio.timeout(CLOSE_WAIT_S), self.client:
                if renewing is not None:
                    renewing.cancel()
                    keys = (names.alive(tag), names.held(tag), names.members)
                    await self.client.eval(scripts.LEAVE, 3, *keys, tag)
        except (TimeoutError, *connection.FAILURES) as error:
            service_log.warning(
                "the other orchestrators do not know that this one leaves: they detect it when its"
                " lease expires",
                extra=fields(error=connection.describe_error(error)),
            )

    async def _renew_for_ever(self) -> None:
        every_s = min(RENEW_S, self._config.lease_s / RENEWALS_PER_LEASE)
        while True:
            try:
                await self._renew()
                self._tell("")
                self._tell_of_gone()
                for call in self.on_seen:
                    call()
            except connection.FAILURES as error:
                self._is_checked = False
                self._tell(connection.describe_error(error))
            except Exception:
                service_log.exception("cannot renew the lease; will retry")
            await asyncio.sleep(every_s)

    async def _renew(self) -> None:
        if not self._is_checked:
            connection.require_version(await self.client.info("server"))
            self._is_checked = True
        self.renewals += 1
        loop, machine = asyncio.get_running_loop(), time.monotonic()
        number, began, before = self.renewals, loop.time(), self._unix()
        async with self.client.pipeline(transaction=False) as pipe:
            self._ask(pipe)
            # Only after it is known that the store may be used.
            parts = self.parts if self.has_renewed and not self.fault else []
            counts = [part.ask(pipe) for part in parts]
            answers = iter(await pipe.execute(raise_on_error=False))
        (layout, renewed, cordons), *more = [list(islice(answers, n)) for n in (3, *counts)]
        for answer in (layout, renewed, cordons):
            if isinstance(answer, Exception):
                raise answer
        connection.require_layout(layout, self.names)  # otherwise nothing was renewed
        # A renewal that arrives late at the store hides a gap from the next renewal.
        is_late = machine > self._renewed_at + self._config.lease_s
        self._renewed_at = machine
        self._take_in(renewed, (before + self._unix()) / 2)
        self.cordons = {
            address.decode(): msgspec.json.decode(ends, type=float | None)
            for address, ends in cordons.items()
        }
        self._look_for_strangers()
        if is_late or (self.has_renewed and not renewed[2]):
            for call in self.on_lapsed:
                call()
        self.has_renewed = True
        for part, own in zip(parts, more, strict=True):
            part.receive(own)
        if loop.time() - began <= PATIENCE_S:
            self.prompt_renewal = number

    def _ask(self, pipe: Any) -> None:
        tag, names = self.tag, self.names
        lease_ms = round(1000 * self._config.lease_s)
        me = msgspec.json.encode(self.me)
        keys = (names.layout, names.alive(tag), names.members)
        pipe.get(names.layout)
        pipe.eval(scripts.RENEW, 3, *keys, tag, me, lease_ms, LAYOUT)
        pipe.hgetall(names.cordons)

    def _take_in(self, renewed: Sequence[Any], now: float) -> None:
        seconds, micros, _, *found = renewed
        self._tasks.skew_s = int(seconds) + int(micros) / 1e6 - now
        self.others = {
            tag.decode(): SeenMember(_read_member(body), bool(is_alive))
            for tag, body, is_alive in zip(found[::3], found[1::3], found[2::3], strict=True)
            if tag.decode() != self.tag
        }

    def is_of_others(self, tag: str) -> bool:
        """Whether a dead member belonged to a different group of live members: it accepted their
        keys, and not the keys of this orchestrator."""
        keys = self.others[tag].member.keys
        return keys != self.me.keys and any(
            seen.is_alive and seen.member.keys == keys for seen in self.others.values()
        )

    async def find(self, tag: str) -> SeenMember | None:
        """Another member from the last renewal. A member that has just joined is read from the
        store. None if no other member has that tag or the store does not answer."""
        if tag in self.others or tag == self.tag:
            return self.others.get(tag)
        try:
            async with self.client.pipeline(transaction=False) as pipe:
                pipe.hget(self.names.members, tag)
                pipe.exists(self.names.alive(tag))
                member, is_alive = await pipe.execute()
        except connection.FAILURES:
            return None
        return None if member is None else SeenMember(_read_member(member), bool(is_alive))

    @contextmanager
    def watched(self, url: str, on_gone: Callable[[], None]) -> Iterator[None]:
        """During the block, call ``on_gone`` when two renewals in a row find no live member at
        ``url``. One is not enough: a store that was emptied lacks leases for a moment."""
        self._watched[on_gone] = url
        try:
            yield
        finally:
            del self._watched[on_gone]

    def _tell_of_gone(self) -> None:
        there = {seen.member.url for seen in self.others.values() if seen.is_alive} | {self.me.url}
        gone = set(self._watched.values()) - there
        for call, url in list(self._watched.items()):
            if url in gone & self._were_gone and not self.was_away_lately:
                call()
        self._were_gone = gone

    def store_time(self) -> float:
        """The current time of the store's clock, in seconds since 1970."""
        return self._unix() + self._tasks.skew_s

    def _look_for_strangers(self) -> None:
        """Find members that seem to belong to another service, and log it when they change."""
        others = [seen.member for seen in self.others.values() if seen.is_alive]
        strangers = sorted(one.url for one in others if one.keys != self.me.keys)
        if strangers and strangers != self.strangers:
            service_log.warning(
                "orchestrators that share a state have different keys: give all of one service "
                "the same keys, and each service its own TIDEGATE_STATE__PREFIX",
                extra=fields(other_keys=", ".join(strangers)),
            )
        self.strangers = strangers

    def _tell(self, fault: str) -> None:
        if fault and not self.fault:
            service_log.error(
                "the shared store is unavailable: this orchestrator continues alone; will retry",
                extra=fields(store=self._config.where, error=fault),
            )
        elif self.fault and not fault:
            service_log.info(
                "the shared store is available again", extra=fields(store=self._config.where)
            )
            self._back_at = time.monotonic()
        self.fault = fault


def _read_member(body: bytes) -> Member:
    """A member from its description. Other versions may have other descriptions."""
    try:
        return msgspec.json.decode(body, type=Member)
    except msgspec.DecodeError:
        return Member("", "unknown")
