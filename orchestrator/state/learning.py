"""Shares what orchestrators learn: lengths of answers, and an instance's step times.

Every few seconds each adds its answers to the store's kinds, and takes in what the others added.
All see the same statistics of an instance's steps: each publishes its estimate now and then, and
one that has seen few starts with that.
"""

import asyncio
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from orchestrator.instances.instance import Instance
from orchestrator.instances.registry import Registry
from orchestrator.prediction.answer_length import HALF_LIFE, AnswerLengths, Link
from orchestrator.prediction.step_learner import StepsLearnt
from orchestrator.prediction.tallies import LengthCounts, LengthTally
from orchestrator.state import connection, scripts
from orchestrator.state.connection import Names
from orchestrator.state.members import Members
from orchestrator.telemetry.log import service_log

EVERY_S = 5.0
"""Seconds between two exchanges."""
ASK_S = 1.0
"""Seconds between two questions about instances of which little is known here."""
KINDS = 128
"""Kinds of answers exchanged at a time, those with the latest answers."""
MAX_KINDS = 1024
"""Kinds that the store knows."""
KEEP_S = 86_400.0
"""Seconds after which the store forgets statistics that got no new samples."""
FEW_WINDOWS = 64
"""Windows of an instance's steps below which others may know more."""


class _Counts(msgspec.Struct, frozen=True):
    """Part of a tally that the store adds."""

    ended: dict[int, float]
    cut: dict[int, float]


class _Steps(msgspec.Struct, frozen=True, array_like=True):
    """The estimate for one instance."""

    instance: str
    learnt: StepsLearnt


class _Young(NamedTuple):
    """An instance of which little is known here."""

    instance: Instance
    digest: str
    windows: int


class SharedLearning:
    """Exchanges learned values with the other orchestrators, after a renewal of the lease."""

    def __init__(
        self, members: Members, names: Names, registry: Registry, lengths: AnswerLengths
    ) -> None:
        self._members = members
        self._names = names
        self._registry = registry
        self._lengths = lengths
        self._next_at = self._ask_at = -math.inf
        self._tell_at: dict[str, float] = {}
        """When to publish each instance's steps, by address, on the machine's own clock."""
        self._exchanging: asyncio.Task[None] | None = None
        lengths.is_shared = True
        members.on_seen.append(self._look)

    def close(self) -> None:
        if self._exchanging is not None:
            self._exchanging.cancel()

    def _look(self) -> None:
        if self._exchanging is not None and not self._exchanging.done():
            return
        now, young = time.monotonic(), list[_Young]()
        if now >= self._ask_at:
            self._ask_at, young = now + ASK_S, self._young()
        is_due = now >= self._next_at
        if is_due:
            self._next_at = now + EVERY_S
        if is_due or young:
            self._exchanging = asyncio.create_task(self._exchange(is_due, young), name="learning")

    async def _exchange(self, is_due: bool, young: Sequence[_Young]) -> None:
        try:
            if young:
                await self._begin_with_others(young)
            if is_due:
                await self._exchange_lengths()
                await self._tell_of_steps()
        except connection.FAILURES:
            return  # the renewals report it; the rest is sent the next time
        except Exception:
            service_log.exception("learned values were not exchanged; will retry")

    # ── lengths of answers ───────────────────────────────────────────────────────────────────

    async def _exchange_lengths(self) -> None:
        told = self._lengths.tallies(KINDS)
        kinds = {msgspec.msgpack.encode(link): link for link in told}
        try:
            async with self._members.client.pipeline(transaction=False) as pipe:
                for kind, link in kinds.items():
                    self._add(pipe, kind, told[link])
                pipe.zrevrange(self._names.lengths, 0, KINDS - 1)
                *merged, latest = await pipe.execute()
        except BaseException:
            self._lengths.not_told(told)
            raise
        for link, body in zip(told, merged, strict=True):
            self._learn(link, body, told[link].answers)
        others = [kind for kind in latest if kind not in kinds]
        if others:
            names = [self._names.lengths_of(kind) for kind in others]
            bodies: Any = await self._members.client.mget(names)
            for kind, body in zip(others, bodies, strict=True):
                if body is not None:
                    self._learn(tuple(msgspec.msgpack.decode(kind)), body)

    def _add(self, pipe: Any, kind: bytes, tally: LengthTally) -> None:
        pipe.eval(
            scripts.LENGTHS,
            2,
            self._names.lengths,
            self._names.lengths_of(kind),
            kind,
            tally.answers,
            tally.kept,
            msgspec.json.encode(_Counts(tally.ended, tally.cut)),
            HALF_LIFE,
            MAX_KINDS,
            round(1000 * KEEP_S),
            self._names.lengths_of(b""),
        )

    def _learn(self, link: Link, body: bytes, told: int = 0) -> None:
        self._lengths.learn(link, msgspec.json.decode(body, type=LengthCounts), told)

    # ── steps of instances ───────────────────────────────────────────────────────────────────

    def _young(self) -> list[_Young]:
        """Instances of which little is known here, where others may know more."""
        if self._members.alive == 1:
            return []
        found = []
        for instance in self._registry:
            learner = instance.step_learner
            if learner is not None and learner.windows < FEW_WINDOWS:
                found.append(_Young(instance, _digest_of(instance), learner.windows))
        return found

    async def _begin_with_others(self, young: Sequence[_Young]) -> None:
        names = [self._names.steps_of(one.instance.address) for one in young]
        bodies: Any = await self._members.client.mget(names)
        for one, body in zip(young, bodies, strict=True):
            learner = one.instance.step_learner
            if body is None or learner is None or _digest_of(one.instance) != one.digest:
                continue
            try:
                known = msgspec.msgpack.decode(body, type=_Steps)
            except msgspec.DecodeError:  # of another version, as while orchestrators are replaced
                continue
            if known.instance == one.digest and known.learnt.windows > learner.windows:
                learner.begin_with(known.learnt)

    async def _tell_of_steps(self) -> None:
        """Publish each instance once per other member in ``EVERY_S``, so that the store's load does
        not grow with members."""
        now = time.monotonic()
        due = {}
        for instance in self._registry:
            learner = instance.step_learner
            if learner is None or learner.windows < FEW_WINDOWS:
                continue
            if now >= self._tell_at.get(instance.address, now):
                due[instance.address] = _Steps(_digest_of(instance), learner.learnt())
                self._tell_at[instance.address] = now + EVERY_S * self._members.alive
        addresses = {instance.address for instance in self._registry}
        self._tell_at = {at: when for at, when in self._tell_at.items() if at in addresses}
        async with self._members.client.pipeline(transaction=False) as pipe:
            for address, steps in due.items():
                body = msgspec.msgpack.encode(steps)
                pipe.set(self._names.steps_of(address), body, px=round(1000 * KEEP_S))
            await pipe.execute()


def _digest_of(instance: Instance) -> str:
    """What must be the same for two orchestrators to speak of the same steps."""
    card = instance.card
    if card is None:
        return ""
    return f"{card.engine_digest} {card.model_digest} {card.max_running} {card.max_step_tokens}"
