"""Slots divided among several orchestrators as the service does it, over a store in memory.

Each tells what it has and wants every ``RENEW_S`` (``orchestrator.state.shares``), all at the same
moment, and hears what the others have told.
"""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from orchestrator.service import Orchestrator
from orchestrator.state.members import RENEW_S
from orchestrator.state.shares import SlotShares


class _Store:
    """The demands of all, by instance: what the service's script keeps in Redis."""

    def __init__(self) -> None:
        self._demands: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self.answers: list[bytes] = []

    def eval(self, _script: str, count: int, *given: Any) -> None:
        """Take in a member's demands, and answer with all on the same instances."""
        keys, (tag, _alive, _keep, *demands) = given[:count], given[count:]
        told = []
        for key, demand in zip(keys, demands, strict=True):
            if demand == "":
                self._demands[key].pop(tag, None)
            else:
                self._demands[key][tag] = demand
                told.append(self._demands[key])
        self.answers.append(msgspec.json.encode(told))


class _Members:
    """All orchestrators, who are always alive."""

    def __init__(self, others: Sequence[str]) -> None:
        self.others = {tag: SimpleNamespace(is_alive=True) for tag in others}
        self.parts: list[SlotShares] = []
        self.on_seen: list[Callable[[], None]] = []
        self.describe: object = None


def share_slots(loop: asyncio.AbstractEventLoop, orchestrators: Sequence[Orchestrator]) -> None:
    """Have the orchestrators divide the slots of their instances from now on."""
    tags = [f"{number:08x}" for number in range(len(orchestrators))]
    store, members, parts = _Store(), list[Any](), list[SlotShares]()
    for tag, orchestrator in zip(tags, orchestrators, strict=True):
        own: Any = _Members([other for other in tags if other != tag])
        names = SimpleNamespace(demands_of=str, alive=str)
        tasks: Any = SimpleNamespace(tag=tag, names=names)
        members.append(own)
        parts.append(SlotShares(own, tasks, orchestrator.registry, orchestrator.queue))

    def renew() -> None:
        for part in parts:
            store.answers.clear()
            part.ask(store)
            part.receive(store.answers)
        for own in members:
            for seen in own.on_seen:
                seen()
        loop.call_later(RENEW_S, renew)

    renew()
