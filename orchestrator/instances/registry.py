"""Holds the set of Triton instances and provides a snapshot for placement.

``InstanceMonitor`` sets their states. ``snapshot_version`` changes with topology and capability,
never with load.
"""

import asyncio
import math
import random
from collections.abc import Callable, Iterator

from orchestrator.clock import Clock
from orchestrator.errors import NotFound
from orchestrator.instances.breaker import Breakers
from orchestrator.instances.candidate import Candidate
from orchestrator.instances.instance import Instance
from orchestrator.instances.prefix_index import PrefixIndex
from orchestrator.lanes import Lane, LaneConfig, LaneOwner, ServerKind, StreamLane, name_of
from orchestrator.prediction.forecaster import Capacity
from orchestrator.telemetry.log import fields, lane_log, service_log

LaneMaker = Callable[[str, LaneConfig, LaneOwner, Clock, random.Random], Lane]
"""Creates a lane; a simulator has its own."""


class Registry:
    """All instances and their lanes."""

    def __init__(
        self,
        entries: tuple[str, ...],
        config: LaneConfig,
        clock: Clock,
        rng: random.Random,
        make_lane: LaneMaker = StreamLane,
        *,
        max_backlog: int = 0,
    ) -> None:
        """``max_backlog``: maximum number of jobs per instance beyond those that it can run."""
        self.snapshot_version = 0
        self.instances: dict[str, Instance] = {}
        self.prefixes = PrefixIndex()
        self.breakers = Breakers(self._peers, clock.now)
        self.is_closing = False
        self._config = config
        self._max_backlog = max_backlog
        self._clock = clock
        self._rng = rng
        self._make_lane = make_lane
        self._owner: LaneOwner | None = None
        self._listeners: list[Callable[[], None]] = []
        for entry in entries:
            self.add(entry)

    def __iter__(self) -> Iterator[Instance]:
        return iter(self.instances.values())

    def listen(self, listener: Callable[[], None]) -> None:
        """Call ``listener`` when an instance was added or removed, changed its state or reported.
        Called from the lanes' readers: it must not wait."""
        self._listeners.append(listener)

    def start(self, owner: LaneOwner) -> None:
        """Connect to every instance, also to later ones; ``owner`` gets their lanes' events."""
        self._owner = owner
        for instance in list(self):
            self._open_lanes(instance, owner)

    async def close(self) -> None:
        self.is_closing = True
        await asyncio.gather(*(lane.close() for instance in self for lane in instance.lanes))

    def changed(self, *, topology: bool = True) -> None:
        """Notify all listeners; without ``topology`` only an instance's load has changed."""
        self.snapshot_version += topology
        if self._owner is None:
            return
        for listener in self._listeners:
            try:
                listener()
            except Exception:  # lanes call this and must not break
                service_log.exception("a listener failed on an instance change; continuing")

    # ── which instances there are ────────────────────────────────────────────────────────────

    def addresses(self) -> dict[str, float | None]:
        """Each instance by its entry, with the time when it began to retire, or None."""
        return {instance.entry: instance.retiring_since for instance in self}

    def idle(self, entry: str) -> bool:
        """Whether an instance has none of our jobs and clips."""
        instance = self.instances[name_of(entry)]
        return not (instance.lane_load or instance.clips_running)

    def ready(self, entry: str) -> bool:
        instance = self.instances.get(name_of(entry))
        return instance is not None and instance.ready

    def add(self, entry: str) -> None:
        """Open lanes to a new instance, or keep one that was retiring. Idempotent. An instance
        whose name another entry still has is not added until that entry is removed."""
        address = name_of(entry)
        instance = self.instances.get(address)
        if instance is None:
            instance = Instance(address, self._max_backlog, entry)
            self.instances[address] = instance
            if self._owner is not None:
                lane_log.info("instance added", extra=fields(instance=address))
                self._open_lanes(instance, self._owner)
        elif instance.retiring_since is None or instance.removed or instance.entry != entry:
            return
        instance.retiring_since = None
        self.changed()

    def retire(self, entry: str) -> None:
        """Stop new work for an instance that will be removed. Idempotent."""
        instance = self.instances[address := name_of(entry)]
        if instance.retiring_since is None:
            instance.retiring_since = self._clock.now()
            lane_log.info("instance retiring", extra=fields(instance=address))
            self.changed()

    async def remove(self, entry: str) -> None:
        """Close an instance's lanes, even with jobs on them, and remove it."""
        instance = self.instances[address := name_of(entry)]
        instance.removed = True
        await asyncio.gather(*(lane.close() for lane in instance.lanes))
        del self.instances[address]
        self.breakers.remove(address)
        lane_log.info("instance removed", extra=fields(instance=address))
        self.changed()

    def cordon(self, address: str, grace_s: float = math.inf) -> Instance:
        """Stop new work for an instance, for an operator. Idempotent. Raises ``NotFound``. Jobs
        that will not end within ``grace_s`` seconds are moved elsewhere if possible."""
        return self._set_cordoned(address, True, self._clock.now() + grace_s)

    def uncordon(self, address: str) -> Instance:
        """Give an instance new work again. Idempotent. Raises ``NotFound``."""
        return self._set_cordoned(address, False, math.inf)

    def named(self, address: str) -> Instance:
        instance = self.instances.get(address)
        if instance is None:
            known = ", ".join(sorted(self.instances)) or "none"
            raise NotFound(f"there is no instance {address[:128]!r}; available: {known}")
        return instance

    def _set_cordoned(self, address: str, cordoned: bool, ends_at: float) -> Instance:
        instance = self.named(address)
        instance.cordon_ends_at = ends_at
        if instance.cordoned is not cordoned:
            instance.cordoned = cordoned
            what = "drained" if cordoned else "undrained"
            lane_log.info("instance %s by an operator", what, extra=fields(instance=address))
            self.changed()
        return instance

    def _open_lanes(self, instance: Instance, owner: LaneOwner) -> None:
        # On other kinds of servers each job is a separate request: one lane is enough.
        is_own = instance.kind is ServerKind.TIDEGATE
        for _ in range(self._config.per_instance if is_own else 1):
            self._open_lane(instance, owner)

    def _open_lane(self, instance: Instance, owner: LaneOwner) -> Lane:
        lane = self._make_lane(instance.entry, self._config, owner, self._clock, self._rng)
        instance.lanes.append(lane)
        lane.start()
        return lane

    async def replace_exhausted_lanes(self) -> None:
        """Replace exhausted lanes, and close replaced ones when their jobs have ended."""
        over: list[Lane] = []
        for instance in self:
            if instance.removed or self._owner is None:
                continue
            for lane in list(instance.lanes):
                if lane.is_exhausted and lane.successor is None:
                    lane.successor = self._open_lane(instance, self._owner)
                elif lane.successor is not None and lane.is_relieved and not lane.load:
                    instance.lanes.remove(lane)
                    lane.successor.take_over(lane)
                    over.append(lane)
        await asyncio.gather(*(lane.close() for lane in over))

    # ── the snapshot ─────────────────────────────────────────────────────────────────────────

    def candidates(self) -> list[Candidate]:
        now = self._clock.now()
        return [
            instance.candidate(encoder, self.breakers.admits(instance.address), now)
            for instance in self
            if (encoder := instance.encoder) is not None
        ]

    def candidate(self, name: str) -> Candidate:
        instance = self.instances[name]
        assert instance.encoder is not None, f"{name} was never a candidate"
        admits = self.breakers.admits(name)
        return instance.candidate(instance.encoder, admits, self._clock.now())

    def capacity(self, model: str) -> Capacity:
        """The capacity of the ready instances for ``model``, or of all ready ones for ``""``."""
        serving = [
            (i, i.pace, card)
            for i in self
            if i.ready and (card := i.card) is not None and model in ("", i.model)
        ]
        all_slots = sum(i.concurrency.slots for i, *_ in serving)
        return Capacity(
            models=tuple(pace for _, pace, _ in serving),
            names=tuple(i.address for i, *_ in serving),
            slots=sum(pace.slots for _, pace, _ in serving),
            free=sum(max(0, pace.slots - i.load) for i, pace, _ in serving),
            # Do not start work that cannot be stopped in time.
            min_start_ms=min(
                (max(card.min_start_budget_ms, card.abort_ms) for *_, card in serving), default=0.0
            ),
            part=sum(i.own_slots for i, *_ in serving) / all_slots if all_slots else 1.0,
        )

    def most_places(self, model: str) -> int:
        """Most jobs for ``model``, or for any (``""``), on the known instances if idle."""
        return sum(i.concurrency.most for i in self if i.model and model in ("", i.model))

    def any_ready(self, model: str) -> bool:
        """Whether some instance can get work for ``model`` now."""
        return any(i.ready and i.model == model for i in self)

    def dark_s(self, model: str) -> float:
        """Seconds without work for all ready instances of ``model``, which fail; 0 if one works."""
        serving = (i.address for i in self if i.ready and i.model == model)
        return min(map(self.breakers.dark_s, serving), default=0.0)

    def any_returning_to(self, model: str) -> bool:
        """Whether some instance may serve ``model`` soon: after a swap or a short silence."""
        return any(i.is_to_serve(model) or i.may_speak_again(model) for i in self)

    def _peers(self, address: str) -> list[str]:
        """Ready instances that can do an instance's work, including itself."""
        instance = self.instances.get(address)
        model = "" if instance is None else instance.model
        return [i.address for i in self if i.ready and model == i.model != ""]
