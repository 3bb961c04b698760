"""Instances that operators have taken out of use, at whichever orchestrator they said so."""

import math
from collections.abc import Awaitable

import msgspec

from orchestrator.instances.registry import Registry
from orchestrator.state import connection
from orchestrator.state.members import Members
from orchestrator.telemetry.log import fields, service_log


class Cordons:
    """Tells the other orchestrators of cordons that are set here, and sets theirs here."""

    def __init__(self, members: Members, name: str, registry: Registry) -> None:
        """``name``: the store's key."""
        self._members = members
        self._name = name
        self._registry = registry
        self._known: dict[str, int] = {}
        """Addresses with a cordon in the store, by the first renewal that reports it."""
        members.on_seen.append(self._apply)

    async def cordoned(self, address: str, grace_s: float) -> None:
        """Tell the others that an instance drains, within ``grace_s`` seconds."""
        ends = None if math.isinf(grace_s) else self._members.store_time() + grace_s
        body = msgspec.json.encode(ends)
        await self._say(address, self._members.client.hset(self._name, address, body))
        self._known[address] = self._members.renewals + 1

    async def uncordoned(self, address: str) -> None:
        await self._say(address, self._members.client.hdel(self._name, address))

    async def _say(self, address: str, said: Awaitable[int]) -> None:
        try:
            await said
        except connection.FAILURES as error:
            service_log.warning(
                "the other orchestrators do not know of an instance's drain: drain it at each",
                extra=fields(instance=address, error=connection.describe_error(error)),
            )

    def _apply(self) -> None:
        stored = self._members.cordons
        for instance in self._registry:
            ends = stored.get(instance.address)
            if instance.address in stored and not instance.cordoned:
                left_s = math.inf if ends is None else ends - self._members.store_time()
                self._registry.cordon(instance.address, max(0.0, left_s))
            elif instance.address not in stored and instance.cordoned:
                told = self._known.get(instance.address, math.inf)
                if told <= self._members.renewals:
                    self._registry.uncordon(instance.address)
        later = {at: first for at, first in self._known.items() if first > self._members.renewals}
        self._known = later | dict.fromkeys(stored, 0)
