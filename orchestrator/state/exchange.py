"""Data that members exchange with each renewal of their lease: runs of calls, sums of spending, and
instances that operators take out of use."""

import math
import time
from collections.abc import Awaitable, Sequence
from typing import Any, Final

import msgspec

from orchestrator.instances.registry import Registry
from orchestrator.sharing import Sums
from orchestrator.state import connection, scripts
from orchestrator.state.members import Members
from orchestrator.tasks.runs import RunNews, Runs
from orchestrator.telemetry.log import fields, service_log


class Cordons:
    """Exchanges with the other orchestrators which instances operators have taken out of use, and
    takes those instances out of use here too."""

    def __init__(self, members: Members, registry: Registry) -> None:
        self._members = members
        self._name = members.names.cordons
        self._registry = registry
        self._known: dict[str, int] = {}
        """Addresses with a cordon in the store, each with the first renewal that reports it."""
        members.on_seen.append(self._apply)

    async def cordoned(self, address: str, grace_s: float) -> None:
        """Tell the other orchestrators that an instance drains within ``grace_s`` seconds."""
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
                "the other orchestrators do not know that an instance drains: drain it at each one",
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


KEEP_RUNS_S = 3600.0
"""Seconds that the store keeps a run. By default no deadline is later."""
MAX_UNTOLD, RUNS_AT_A_TIME = 4096, 256


class _RunUpdate(msgspec.Struct, frozen=True, array_like=True):
    news: RunNews
    ends: float
    """The run's deadline in seconds of the store's clock; 0 for a call that has ended."""


class SharedRuns:
    """Exchanges runs with calls at several orchestrators in each renewal. No request waits for it.
    All members know a call after two renewals (half a second), usually before its client makes the
    next call. A call that arrives sooner has only its own deadline.
    """

    def __init__(self, members: Members, runs: Runs) -> None:
        self._members = members
        self._runs = runs
        self._untold: list[bytes] = []
        self._asked = 0
        """Number of these in the running renewal."""
        self._last = b"0"
        """Id of the last received entry."""
        runs.on_news = self._note
        members.parts.append(self)

    def _note(self, news: RunNews) -> None:
        ends = 0.0 if news.calls is None else self._members.store_time() + news.left_s
        self._untold.append(msgspec.msgpack.encode(_RunUpdate(news, ends)))
        if len(self._untold) > MAX_UNTOLD:  # the store is unavailable
            del self._untold[0]

    def ask(self, pipe: Any) -> int:
        told, members = self._untold[:RUNS_AT_A_TIME], self._members
        self._asked = len(told)
        facts = (members.tag, self._last, MAX_UNTOLD, round(1000 * KEEP_RUNS_S))
        pipe.eval(scripts.RUNS, 1, members.names.runs, *facts, *told)
        return 1

    def receive(self, answers: Sequence[Any]) -> None:
        (entries,) = answers
        if isinstance(entries, Exception):  # others do not get runs while the store refuses them
            return
        del self._untold[: self._asked]
        for entry_id, (_, tag, _, body) in entries:
            self._last = entry_id
            if tag.decode() == self._members.tag:
                continue
            try:
                heard = msgspec.msgpack.decode(body, type=_RunUpdate)
            except msgspec.DecodeError:
                service_log.exception("cannot read a run of another orchestrator")
                continue
            left_s = heard.ends - self._members.store_time() if heard.ends else 0.0
            self._runs.hear(msgspec.structs.replace(heard.news, left_s=left_s))


EVERY_S = 1.0
"""Seconds between two exchanges."""
KEEP_S: Final = 62 * 86_400.0
"""Seconds that the store keeps an unchanged sum: for this month and the last month."""


class SharedSums:
    """Exchanges the spending of keys and runs. Each member writes its sums under its own tag. So a
    sum that is written twice counts once, and the sums of an ended process stay."""

    def __init__(self, members: Members, sums: Sums) -> None:
        self._members = members
        self._sums = sums
        self._next_at = -math.inf
        self._asked: list[str] = []
        members.parts.append(self)

    def ask(self, pipe: Any) -> int:
        self._asked.clear()
        members, now = self._members, time.monotonic()
        if now >= self._next_at:
            self._next_at = now + EVERY_S
            for name, (tokens, cost) in self._sums.own().items():
                sum_name = members.names.sum(name)
                pipe.hset(sum_name, members.tag, f"{tokens} {cost}")
                pipe.pexpire(sum_name, round(1000 * KEEP_S))
                pipe.hgetall(sum_name)
                self._asked.append(name)
        return 3 * len(self._asked)

    def receive(self, answers: Sequence[Any]) -> None:
        for name, parts in zip(self._asked, answers[2::3], strict=True):
            if isinstance(parts, Exception):  # the next exchange asks again
                continue
            mine = self._members.tag.encode()
            others = [part.split() for tag, part in parts.items() if tag != mine]
            tokens, cost = sum(int(part[0]) for part in others), sum(float(p[1]) for p in others)
            self._sums.hear(name, (tokens, cost))
