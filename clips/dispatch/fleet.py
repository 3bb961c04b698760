"""The instances for clips: which have the slot model, their health, and our clips on them.

It follows the registry: instances added, removed or drained there change here, too.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterator
from enum import StrEnum
from typing import Final

import msgspec
from google.protobuf.message import DecodeError

from clips.dispatch.attempt import ClipAttempt
from clips.dispatch.forecast import NOMINAL_ABILITY, Ability, InstanceTimeline
from clips.dispatch.wire import (
    METHOD,
    BadAnswer,
    ClipAnswer,
    is_absence,
    read_answer,
    request,
)
from clips.state import ClipsState
from orchestrator.extension import Core
from orchestrator.lanes import LaneConfig, ServerKind
from orchestrator.lanes.config import DOWN_AFTER_S, OPEN_TIMEOUT_S, SUSPECT_AFTER_S
from orchestrator.lanes.grpc_call import CallEnded, GrpcCall, open_call
from orchestrator.lanes.reconnector import GROWTH, LONGEST_PAUSE_S, Reconnector, SessionEnd
from orchestrator.telemetry.log import fields, lane_log
from orchestrator.telemetry.metrics import MetricRow, Samples

LOOK_AGAIN_S: Final = 5.0
"""Maximum seconds between checks of an instance that never had the model."""
RENEW_S = 5.0
"""Seconds after which a watch is restarted."""


class LinkBroken(Exception):
    """The watch has ended; the message says why, for people."""


class ClipLink:
    """Keeps a watch open on the instance at ``address``, which reports its state::

        connect ─▶ watch ─▶ state, state, …  ─▶ broken ─▶ back-off ─▶ connect …
                      └──▶ no such model here: checked again periodically

    The link reconnects periodically. After Triton has reloaded the model, the old one still sends
    states here while clips go to the new one. Also, only a reconnect shows that it was unloaded.
    """

    def __init__(
        self, address: str, config: LaneConfig, owner: "ClipFleet", rng: random.Random
    ) -> None:
        self.sessions = Reconnector(
            "slot link",
            address,
            self._keep_watching,
            self._session_ended,
            rng=rng,
            expected=(CallEnded, LinkBroken, BadAnswer, DecodeError, msgspec.DecodeError),
        )
        self._address = address
        self._config = config
        self._owner = owner
        self._call: GrpcCall | None = None
        self._first: asyncio.Future[None] | None = None
        self._was_there = False
        """Whether the model has been there before: then it may be reloading."""
        self._absence = ""
        """Triton's message if it has no slot model; otherwise empty."""

    async def _session_ended(self, end: SessionEnd) -> None:
        self._first = None
        if end.is_closed:
            return
        # A closed connection says nothing about the model.
        absence = self._absence if end.error is not None else ""
        looks_seldom = bool(absence) and not self._was_there
        self.sessions.growth = 2.0 if looks_seldom else GROWTH
        self.sessions.longest_pause_s = LOOK_AGAIN_S if looks_seldom else LONGEST_PAUSE_S
        self._owner.link_closed(self._address, absence or end.reason, is_absent=bool(absence))

    async def _keep_watching(self) -> None:
        """Run one watch after the other; the model's state stays known in between."""
        while True:
            await self._watch()

    async def _watch(self) -> None:
        """Run one watch until its time is over. Raises if it ends before."""
        self._first = asyncio.get_running_loop().create_future()
        self._absence = ""
        call: GrpcCall | None = None
        try:
            async with asyncio.timeout(OPEN_TIMEOUT_S):
                call = self._call = await open_call(
                    self._address, METHOD, self._take, self._config.keepalive_s, self._config.tls
                )
                call.send(request(b"", "watch", {"watch": True}))
                await asyncio.wait([self._first, call.ended], return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait([call.ended], timeout=RENEW_S)
            if self._absence:
                raise LinkBroken(self._absence)
            if call.ended.done():
                call.ended.result()  # raises
        finally:
            self._call = None
            if call is not None:
                await call.close()

    def _take(self, messages: list[bytes]) -> None:
        for message in messages:
            answer = read_answer(message)
            if answer is not None:
                self._take_answer(answer)

    def _take_answer(self, answer: ClipAnswer) -> None:
        if answer.error:
            if not is_absence(answer.error):
                raise LinkBroken(answer.error)
            self._absence = answer.error
            if self._call is not None:
                self._call.finish()
            return
        if answer.event.get("event") != "state":
            raise BadAnswer(f"expected a state, got {answer.event.get('event')!r}")
        state = msgspec.convert(answer.event, ClipsState)
        if self._first is not None and not self._first.done():
            self._first.set_result(None)
            self.sessions.is_up()
        self._was_there = True
        self._owner.state_came(self._address, state)


class ClipHealth(StrEnum):
    """Whether an instance can receive clips: only ``up`` can."""

    ABSENT = "absent"
    """The instance has no slot model."""
    CONNECTING = "connecting"
    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"


class ClipInstance:
    """The known facts about one instance's slot model."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.health = ClipHealth.CONNECTING
        self.reason = "not reached yet"
        self.state: ClipsState | None = None
        """The latest reported state; None before the first."""
        self.ability = NOMINAL_ABILITY
        self.heard_at = 0.0
        """When that came; 0 if none came."""
        self.attempts: list[ClipAttempt] = []
        """Our attempts there, in the order in which they were sent."""
        self.others = 0
        """Number of clips of other orchestrators there, from its latest state."""

    @property
    def is_known(self) -> bool:
        return self.health in (ClipHealth.UP, ClipHealth.SUSPECT)

    @property
    def is_draining(self) -> bool:
        return self.state is not None and self.state.draining

    @property
    def free(self) -> int:
        return max(0, self.ability.slots - len(self.attempts) - self.others)

    def line(self, now: float) -> InstanceTimeline:
        """The instance's leases and stages as they will become free."""
        others_s: list[float] = []
        if self.others and self.state is not None:
            since_s = now - self.heard_at
            others_s = [s - since_s for s in sorted(self.state.free_in_s)[-self.others :]]
        begun = [attempt.begun for attempt in self.attempts]
        return InstanceTimeline(self.ability, now, begun, others_s)

    def give_up(self, reason: str) -> None:
        """Count its attempts as lost."""
        for attempt in list(self.attempts):
            attempt.give_up(reason)

    def take_state(self, state: ClipsState, now: float) -> bool:
        """Store the latest state. Returns whether it affects placement."""
        before = (self.free, self.is_draining)
        if self.state is None or _told(state) != _told(self.state):
            self.ability = Ability.of(state)
        self.state, self.heard_at = state, now
        self.others = max(0, state.slots_total - state.slots_free - len(self.attempts))
        return (self.free, state.draining) != before


class ClipFleet:
    """All instances. ``on_change`` is called when clips may be placed differently."""

    def __init__(self, core: Core) -> None:
        self.instances: dict[str, ClipInstance] = {}
        self.on_change: Callable[[], None] = lambda: None
        self._core = core
        self._registry = core.registry
        self._clock = core.clock
        self._links: dict[str, ClipLink] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._checked_at = core.clock.now()
        self._is_running = False
        self._known_version = -1
        core.metrics.watch(self, _ROWS)

    def __iter__(self) -> Iterator[ClipInstance]:
        return iter(self.instances.values())

    def start(self) -> None:
        """Start to look for the slot model on every instance."""
        if not self._core.is_simulated:  # simulated instances are no Tritons
            self._is_running = True
            self._registry.listen(self.instances_changed)
            self.instances_changed()

    async def close(self) -> None:
        self._is_running = False
        links = [*self._links.values()]
        self._links.clear()
        await asyncio.gather(*(link.sessions.close() for link in links), *self._closing)

    def ready(self) -> list[ClipInstance]:
        """Instances that accept new clips."""
        return [instance for instance in self if self.is_ready(instance)]

    def is_ready(self, instance: ClipInstance) -> bool:
        known = self._registry.instances.get(instance.address)
        is_in_use = known is not None and not known.is_out_of_use
        return instance.health is ClipHealth.UP and is_in_use and not instance.is_draining

    @property
    def is_served(self) -> bool:
        """Whether any instance is known to have the model."""
        return any(instance.health is not ClipHealth.ABSENT for instance in self.seen())

    def seen(self) -> list[ClipInstance]:
        """Instances that have had the model, up or not."""
        return [instance for instance in self if instance.heard_at]

    def check_heartbeats(self) -> None:
        """Check every instance for silence; call it about every 250 ms. If this process itself is
        late, states are still unread, so their age is ignored.
        """
        now = self._clock.now()
        is_late = now - self._checked_at > SUSPECT_AFTER_S
        self._checked_at = now
        if is_late:
            return
        for instance in self:
            was = instance.health
            if was in (ClipHealth.ABSENT, ClipHealth.DOWN) or not instance.heard_at:
                continue
            silent_s = now - instance.heard_at
            reason = f"no state for {silent_s:.1f} s"
            if silent_s >= DOWN_AFTER_S:
                # The streams of its clips may still be open, although the peer is gone.
                self._set(instance, ClipHealth.DOWN, reason)
                instance.give_up(reason)
                if was is not ClipHealth.CONNECTING:
                    self._links[instance.address].sessions.break_off(reason)
            elif silent_s >= SUSPECT_AFTER_S and was is not ClipHealth.CONNECTING:
                self._set(instance, ClipHealth.SUSPECT, reason)

    def gone(self, address: str) -> None:
        """Note that Triton unloaded the slot model there, though the watch continues."""
        if (instance := self.instances.get(address)) is not None:
            reason = "the model was unloaded"
            self._set(instance, ClipHealth.CONNECTING, reason)
            self._links[address].sessions.break_off(reason)

    def count(self, address: str) -> None:
        """Report the number of our clips on the instance to the registry."""
        known, ours = self._registry.instances.get(address), self.instances.get(address)
        if known is not None and ours is not None:
            known.clips_running = len(ours.attempts)

    # ── as the registry's listener ───────────────────────────────────────────────────────────

    def instances_changed(self) -> None:
        """Follow an instance that was added, removed or drained."""
        if not self._is_running or self._registry.snapshot_version == self._known_version:
            return
        self._known_version = self._registry.snapshot_version
        known = self._registry.instances
        for address in known.keys() - self._links.keys():
            if not known[address].removed and known[address].kind is ServerKind.TIDEGATE:
                self.instances[address] = ClipInstance(address)
                link = ClipLink(address, self._core.settings.lanes, self, self._core.rng)
                self._links[address] = link
                link.sessions.start()
        gone = [a for a in self._links if a not in known or known[a].removed]
        for address in gone:
            closing = asyncio.ensure_future(self._links.pop(address).sessions.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)
            self.instances.pop(address).give_up("the instance was removed")
        self.on_change()

    # ── for links, which call from their readers ─────────────────────────────────────────────

    def state_came(self, address: str, state: ClipsState) -> None:
        instance = self.instances.get(address)
        if instance is None:
            return
        changed = instance.take_state(state, self._clock.now())
        if instance.health is not ClipHealth.UP:
            self._set(instance, ClipHealth.UP, "")
        elif changed:
            self.on_change()

    def link_closed(self, address: str, reason: str, *, is_absent: bool) -> None:
        """The link is closed; ``is_absent``: because the instance has no slot model."""
        instance = self.instances.get(address)
        if instance is None:
            return
        if is_absent:
            instance.state = None
            instance.others = 0
            self._set(instance, ClipHealth.ABSENT, reason)
        elif instance.health is not ClipHealth.DOWN:
            self._set(instance, ClipHealth.CONNECTING, reason)
        # Its clips have their own streams, which report when they end.

    def _set(self, instance: ClipInstance, health: ClipHealth, reason: str) -> None:
        instance.reason = reason
        if (known := self._registry.instances.get(instance.address)) is not None:
            known.other_work = "clips" if health is ClipHealth.UP else ""
        if health is instance.health:
            return
        was, instance.health = instance.health, health
        is_news = instance.heard_at > 0  # most instances never have the model
        level = logging.INFO if health is ClipHealth.UP else logging.WARNING
        lane_log.log(
            level if is_news else logging.DEBUG,
            "an instance's slot model is %s",
            health.value,
            extra=fields(instance=instance.address, was=was.value, reason=reason or None),
        )
        self.on_change()


def _told(state: ClipsState) -> tuple[object, ...]:
    """The fields of a state that determine an ability."""
    limits = (state.max_size, state.max_seconds, state.buffer_s, state.slots_total)
    return (state.stages, *limits)


def _buffers(fleet: ClipFleet) -> Samples:
    for instance in fleet:
        if instance.is_known:
            yield (instance.address, "total"), instance.ability.slots
            yield (instance.address, "free"), instance.free


def _aborts(fleet: ClipFleet) -> Samples:
    for instance in fleet:
        state = instance.state
        if state is not None and state.abort_to_free_p50_ms is not None:
            yield (instance.address, "0.5"), state.abort_to_free_p50_ms
        if state is not None and state.abort_to_free_p99_ms is not None:
            yield (instance.address, "0.99"), state.abort_to_free_p99_ms


_ROWS: tuple[MetricRow[ClipFleet], ...] = (
    MetricRow(
        "gauge",
        "instance_slot_buffers",
        "slots",
        "Clips that an instance can render at once, and how many more it can take now",
        _buffers,
        ("instance", "kind"),
    ),
    MetricRow(
        "gauge",
        "slot_abort_to_freed_ms",
        "ms",
        "From a cancel or a deadline to the slot's buffers being free, as the worker has it",
        _aborts,
        ("instance", "quantile"),
    ),
)
