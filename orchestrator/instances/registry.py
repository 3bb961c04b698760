"""The Triton instances there are, what they serve, and how they are.

An instance's state follows its lanes (OR-6)::

    CONNECTING ──card, tokenizer ready──▶ UP ◀──frame── SUSPECT ──silent 3 s──▶ DOWN
         ▲                                └──silent 1 s──▶┘                       │
         └───────────────────── every lane closed, tries again ◀──────────────────┘

One whose card cannot be used has a ``fault``: it stays CONNECTING until another card comes.

``snapshot_version`` moves with topology and capability, never with load.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from enum import StrEnum
from functools import partial

from orchestrator.clock import Clock
from orchestrator.errors import ModelNotFound, NotFound, NotReady
from orchestrator.instances.breaker import Breakers
from orchestrator.instances.candidate import Candidate
from orchestrator.instances.concurrency import Window
from orchestrator.instances.prefix_index import PrefixIndex
from orchestrator.lanes import Lane, LaneConfig, LaneOwner
from orchestrator.prediction import Load, Quantiles, StepLearner
from orchestrator.prediction.forecaster import Capacity
from orchestrator.prompts.encoder import BadCard, PromptEncoder
from orchestrator.telemetry.log import fields, lane_log
from worker.protocol import Frame, KvReport, ModelCard, WorkerStats


class InstanceState(StrEnum):
    """Whether an instance can be given work: only ``up`` can."""

    CONNECTING = "connecting"
    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"


LANE_SILENT_S = 0.6
"""A lane that missed two heartbeats more than its freshest sibling is the last to get work."""

CANDIDATE_TTL_S = 0.05
"""What placement knows of an instance is worked out anew after this, if nothing told before."""


FIRST_WAY_MS = 5.0
_WAYS = 128

LaneMaker = Callable[[str, LaneConfig, LaneOwner, Clock, random.Random], Lane]
"""How lanes come to be; a simulator has its own."""


class Instance:
    """One Triton and the lanes to it."""

    def __init__(self, address: str, most_backlog: int = 0) -> None:
        self.address = address
        self.window = Window(most_backlog)
        self.reporter: Lane | None = None
        """The lane whose cache reports are read; each tells the same."""
        self.lanes: list[Lane] = []
        self.state = InstanceState.CONNECTING
        self.reason = "not reached yet"
        """Why it is not up, for people; empty while it is."""
        self.fault = ""
        """Why its last card cannot be used, which no waiting mends; empty when it can."""
        self.draining = False
        """The worker itself takes no new work."""
        self.held = False
        """An operator wants it to have no new work."""
        self.leaving_since: float | None = None
        """When it was taken off the list, in seconds of the clock; None while it is on it."""
        self.forgotten = False
        self.told: ModelCard | None = None
        """The last card that came; ``card`` follows once its tokenizer is ready."""
        self.encoder: PromptEncoder | None = None
        self.stats: WorkerStats | None = None
        self.pace: StepLearner | None = None
        """What it has taught about its speed; None until its card is known."""
        self.way_ms = Quantiles([FIRST_WAY_MS] * 9, _WAYS)
        """Of jobs that ended: what they took beyond the worker's own account, there and back."""
        self.foreign_load = 0
        """Jobs on the worker that are not ours, by its last statistics."""
        self._candidate: tuple[object, Candidate] | None = None
        self._candidate_until = 0.0

    @property
    def card(self) -> ModelCard | None:
        return None if self.encoder is None else self.encoder.card

    @property
    def chat_fault(self) -> str:
        """Why it takes plain prompts only; empty where it takes chats, or nothing was said."""
        return "" if self.encoder is None else self.encoder.chat_fault

    @property
    def is_up(self) -> bool:
        """Whether jobs go on there."""
        return (
            self.state is InstanceState.UP
            and not self.forgotten
            and any(lane.is_open for lane in self.lanes)
        )

    @property
    def ready(self) -> bool:
        """Whether it takes new work."""
        return (
            self.state is InstanceState.UP
            and not (self.forgotten or self.draining or self.held)
            and self.leaving_since is None
            and any(lane.is_open and not lane.is_closing for lane in self.lanes)
        )

    @property
    def is_reopening(self) -> bool:
        """Whether it will take new work in a moment: its model was loaded anew."""
        return any(lane.is_reopening for lane in self.lanes) and not (
            self.forgotten or self.held or self.leaving_since is not None
        )

    @property
    def load(self) -> int:
        """Jobs that have or want a slot there."""
        return sum(lane.load for lane in self.lanes) - self.window.paused + self.foreign_load

    @property
    def has_free_slot(self) -> bool:
        return self.load < self.window.slots

    @property
    def can_pause(self) -> bool:
        """Whether its jobs can leave their slot and keep their KV."""
        return self.card is not None and self.card.can_pause

    @property
    def load_ahead(self) -> Load:
        """How many jobs it has, not what they still need: that is ``window.ahead``.

        Jobs are judged and learnt from by this one. On the simulator (one minute, twice the
        capacity) ``window.ahead`` here took goodput from 31.0/s to 20.4 and waste to 22 %.
        """
        slots = 1 if self.card is None else self.card.max_running
        running = min(self.load, slots)
        return Load(running=running, waiting=self.load - running)

    def candidate(self, encoder: PromptEncoder, is_admitted: bool, now: float) -> Candidate:
        """Itself as placement sees it at ``now``. Kept for a moment while nothing changes.

        ``is_admitted``: its breaker lets work through.
        """
        ready = is_admitted and self.ready
        pace = None if self.pace is None or not self.pace.is_measured else self.pace.model
        key = (self.load, ready, self.is_up, self.window.size, self.window.slots, self.stats, pace)
        if self._candidate is not None and now < self._candidate_until:
            known, candidate = self._candidate
            if known == key:
                return candidate
        card, stats = encoder.card, self.stats
        most = card.context_tokens
        if stats is not None and stats.kv_blocks_total:
            most = min(most, stats.kv_blocks_total * card.block_tokens)
        candidate = Candidate(
            name=self.address,
            model=card.model,
            vocabulary=encoder.vocabulary,
            ready=ready,
            slots=self.window.size,
            rows=self.window.slots,
            most_rows=card.max_running,
            is_up=self.is_up,
            load=self.load,
            most_tokens=most,
            kv_free=0 if stats is None else stats.kv_blocks_free,
            pace=None if pace is None else pace.under(self.window.ahead(self.load)),
            device=card.device,
        )
        self._candidate, self._candidate_until = (key, candidate), now + CANDIDATE_TTL_S
        return candidate

    def best_lane(self) -> Lane:
        """The open lane with the fewest jobs, of those that have had a frame lately."""
        lanes = [lane for lane in self.lanes if lane.is_open and not lane.is_closing]
        freshest = max(lane.last_frame_at for lane in lanes)
        return min(
            lanes, key=lambda lane: (freshest - lane.last_frame_at > LANE_SILENT_S, lane.load)
        )

    def silent_s(self, now: float) -> float:
        """Since when no open lane has had a frame, in seconds."""
        return min((lane.silent_s(now) for lane in self.lanes if lane.is_open), default=0.0)


class Registry:
    """Owns all instances and lanes. ``on_change`` is called when something may be placed anew."""

    def __init__(
        self,
        addresses: tuple[str, ...],
        *,
        lanes_per_instance: int,
        lane_config: LaneConfig,
        suspect_after_s: float,
        down_after_s: float,
        worker_backlog: int,
        clock: Clock,
        rng: random.Random,
        executor: Executor,
        special_in_prompts: bool = False,
        on_change: Callable[[], None],
        on_emission: Callable[[float, int], None],
        make_lane: LaneMaker = Lane,
    ) -> None:
        self.snapshot_version = 0
        self.instances: dict[str, Instance] = {}
        self.prefixes = PrefixIndex()
        self.breakers = Breakers(self._peers, clock.now)
        self._suspect_after_s = suspect_after_s
        self._down_after_s = down_after_s
        self._backlog = worker_backlog
        self._clock = clock
        self._executor = executor
        self._make_encoder = partial(PromptEncoder, special_in_prompts=special_in_prompts)
        self._on_change = on_change
        self.emission_sampled = on_emission
        self._loading: set[asyncio.Task[None]] = set()
        self._looked_at = clock.now()
        self._closing = False
        self._started = False
        self._lanes_per_instance = lanes_per_instance
        self._lane_config = lane_config
        self._make_lane = make_lane
        self._rng = rng
        for address in addresses:
            self.add(address)

    def __iter__(self) -> Iterator[Instance]:
        return iter(self.instances.values())

    def start(self) -> None:
        """Start connecting to every instance."""
        self._started = True
        for instance in self:
            for lane in instance.lanes:
                lane.start()

    async def close(self) -> None:
        """Close every lane: workers stop whatever still runs on them."""
        self._closing = True
        for task in self._loading:
            task.cancel()
        await asyncio.gather(*(lane.close() for instance in self for lane in instance.lanes))

    # ── which instances there are ────────────────────────────────────────────────────────────

    def addresses(self) -> dict[str, float | None]:
        """Every instance, and since when it is leaving if it is."""
        return {instance.address: instance.leaving_since for instance in self}

    def idle(self, address: str) -> bool:
        """Whether no job of ours is on an instance."""
        return not any(lane.load for lane in self.instances[address].lanes)

    def add(self, address: str) -> None:
        """Open lanes to one more instance, or keep one that was leaving. Idempotent."""
        instance = self.instances.get(address)
        if instance is None:
            instance = self.instances[address] = Instance(address, self._backlog)
            instance.lanes = [
                self._make_lane(address, self._lane_config, self, self._clock, self._rng)
                for _ in range(self._lanes_per_instance)
            ]
            if self._started:
                lane_log.info("instance added", extra=fields(instance=address))
                for lane in instance.lanes:
                    lane.start()
        elif instance.leaving_since is None or instance.forgotten:
            return
        instance.leaving_since = None
        self._topology_moved()

    def retire(self, address: str) -> None:
        """Give an instance no new work, for it is about to be forgotten. Idempotent."""
        instance = self.instances[address]
        if instance.leaving_since is None:
            instance.leaving_since = self._clock.now()
            lane_log.info("instance leaving", extra=fields(instance=address))
            self._topology_moved()

    async def forget(self, address: str) -> None:
        """Close an instance's lanes, whatever still runs on them, and drop it."""
        instance = self.instances[address]
        instance.forgotten = True
        await asyncio.gather(*(lane.close() for lane in instance.lanes))
        del self.instances[address]
        self.breakers.forget(address)
        lane_log.info("instance removed", extra=fields(instance=address))
        self._topology_moved()

    def hold(self, address: str, held: bool) -> Instance:
        """Give an instance no new work, or some again. Idempotent. Raises ``NotFound``."""
        instance = self.instances.get(address)
        if instance is None:
            known = ", ".join(sorted(self.instances)) or "none"
            raise NotFound(f"there is no instance {address[:128]!r}; there is: {known}")
        if instance.held is not held:
            instance.held = held
            what = "instance drained by an operator" if held else "instance undrained"
            lane_log.info(what, extra=fields(instance=address))
            self._topology_moved()
        return instance

    def _topology_moved(self) -> None:
        self.snapshot_version += 1
        if self._started:
            self._on_change()

    # ── what can be served ───────────────────────────────────────────────────────────────────

    def candidates(self) -> list[Candidate]:
        """A snapshot for placement."""
        now = self._clock.now()
        return [
            instance.candidate(encoder, self.breakers.admits(instance.address), now)
            for instance in self
            if (encoder := instance.encoder) is not None
        ]

    def candidate(self, name: str) -> Candidate:
        """One of ``candidates`` as it is now."""
        instance = self.instances[name]
        assert instance.encoder is not None, f"{name} was never a candidate"
        admits = self.breakers.admits(name)
        return instance.candidate(instance.encoder, admits, self._clock.now())

    def prospect(self, model: str) -> Capacity:
        """What the instances that are ready can do for ``model``, or all of them for ``""``."""
        serving = [
            (i, i.pace.model, i.encoder.card)
            for i in self
            if i.ready
            and i.pace is not None
            and i.encoder is not None
            and (not model or i.encoder.card.model == model)
        ]
        return Capacity(
            models=tuple(pace for _, pace, _ in serving),
            slots=sum(pace.slots for _, pace, _ in serving),
            free=sum(max(0, pace.slots - i.load) for i, pace, _ in serving),
            min_start_ms=min((card.min_start_budget_ms for *_, card in serving), default=0.0),
        )

    def models(self) -> dict[str, PromptEncoder]:
        """Models by name that are known, up or not. A ready instance's card is preferred."""
        known: dict[str, PromptEncoder] = {}
        for instance in sorted(self, key=lambda instance: instance.ready):
            if instance.encoder is not None:
                known[instance.encoder.card.model] = instance.encoder
        return known

    def resolve(self, model: str) -> PromptEncoder:
        """The model of that name, or the only one when the name is empty.

        Raises ``NotReady`` while no instance has told what it serves, else ``ModelNotFound``.
        """
        known = self.models()
        if not known:
            faults = sorted({instance.fault for instance in self if instance.fault})
            if faults:
                raise NotReady(f"no instance can serve: {'; '.join(faults)}")
            raise NotReady("no instance has been reached yet; try again in a moment")
        if not model and len(known) == 1:
            return next(iter(known.values()))
        if model in known:
            return known[model]
        names = ", ".join(sorted(known))
        if not model:
            raise ModelNotFound(f"several models are served, name one: {names}", field="model")
        raise ModelNotFound(
            f"the model {model[:128]!r} is not served here; there is: {names}", field="model"
        )

    def any_ready(self, model: str) -> bool:
        """Whether some instance could be given work for ``model`` now."""
        return any(i.ready and i.card is not None and i.card.model == model for i in self)

    def _peers(self, address: str) -> list[str]:
        """Those that are ready and could do an instance's work, itself among them."""
        instance = self.instances.get(address)
        card = None if instance is None else instance.card
        if card is None:
            return []
        return [i.address for i in self if i.ready and i.card and i.card.model == card.model]

    # ── what lanes tell ──────────────────────────────────────────────────────────────────────

    def lane_opened(self, lane: Lane, first: Frame) -> None:
        lane_log.info("lane opened", extra=fields(instance=lane.address))
        self.lane_news(lane, first)

    def lane_news(self, lane: Lane, frame: Frame) -> None:
        instance = self.instances[lane.address]
        if frame.card is not None:
            self._know(instance, frame.card)
        if frame.cache is not None:
            self._cache_reported(instance, lane, frame.cache)
        if frame.stats is not None:
            instance.stats = frame.stats
            instance.window.observe(frame.stats)
            if instance.pace is not None:
                instance.pace.observe(frame.stats)
            ours = sum(lane.load for lane in instance.lanes)
            stats, mine = frame.stats, instance.window.paused
            active = stats.running + stats.waiting
            # Statistics older than a pause or a resume of ours must count nobody twice; others'
            # paused jobs hold no slot.
            theirs = min(active + stats.paused - ours, active - (ours - mine))
            instance.foreign_load = max(0, theirs)
            draining = frame.draining or any(other.is_closing for other in instance.lanes)
            if draining != instance.draining:
                instance.draining = draining
                self.snapshot_version += 1
                if draining and not self._closing:
                    lane_log.warning(
                        "the worker drains, which nobody asked for here"
                        if frame.draining
                        else "Triton takes no more requests for the model",
                        extra=fields(instance=lane.address),
                    )
            self._on_change()
        if instance.state is InstanceState.SUSPECT:
            self._judge(instance)

    def lane_closed(self, lane: Lane, reason: str) -> None:
        instance = self.instances[lane.address]
        if reason != instance.reason:  # an instance that stays away is not worth a line each time
            meant = self._closing or instance.forgotten
            level = logging.INFO if meant else logging.WARNING
            lane_log.log(level, "lane closed: %s", reason, extra=fields(instance=lane.address))
        if not any(other.is_open for other in instance.lanes):
            instance.stats = None
            instance.foreign_load = 0
            instance.draining = False
            if instance.state is not InstanceState.DOWN:
                self._set_state(instance, InstanceState.CONNECTING, reason)
        if lane.is_reopening:
            for other in instance.lanes:
                other.reopen()
        if lane is instance.reporter:
            self._lose_reporter(instance)
        instance.reason = reason if instance.state is not InstanceState.UP else ""

    def look(self) -> None:
        """Judge every instance by the age of its last frame; to be called every 250 ms or so.

        When we are late ourselves, frames wait unread and their age says nothing about a worker.
        """
        now = self._clock.now()
        stalled = now - self._looked_at > self._suspect_after_s
        self._looked_at = now
        if stalled:
            return
        for instance in self:
            self._judge(instance)

    # ── inside ───────────────────────────────────────────────────────────────────────────────

    def _judge(self, instance: Instance) -> None:
        if instance.encoder is None or instance.fault:
            return
        if not any(lane.is_open for lane in instance.lanes):
            return
        now = self._clock.now()
        silent_s = instance.silent_s(now)
        if silent_s >= self._down_after_s:
            self._set_state(instance, InstanceState.DOWN, f"no frame for {silent_s:.1f} s")
        elif silent_s >= self._suspect_after_s:
            self._set_state(instance, InstanceState.SUSPECT, f"no frame for {silent_s:.1f} s")
        else:
            self._set_state(instance, InstanceState.UP, "")
        # A lane can die alone: its jobs must not wait for as long as its siblings live.
        for lane in instance.lanes:
            lane.probe()
            if lane.is_open and lane.silent_s(now) >= self._down_after_s:
                lane.break_off(f"no frame for {lane.silent_s(now):.1f} s")

    def _set_state(self, instance: Instance, state: InstanceState, reason: str) -> None:
        instance.reason = reason
        if state is instance.state:
            return
        lane_log.info(
            "instance %s: %s %s",
            state,
            instance.address,
            f"({reason})" if reason else "is ready",
            extra=fields(instance=instance.address, state=state.value, was=instance.state.value),
        )
        instance.state = state
        self.snapshot_version += 1
        self._on_change()

    def _know(self, instance: Instance, card: ModelCard) -> None:
        """Make the card's tokenizer usable; the instance is up once that is done."""
        if instance.fault and instance.told == card:  # on another lane
            self._set_state(instance, InstanceState.CONNECTING, instance.fault)
            return
        instance.told = card
        instance.fault = ""
        for encoder in (instance.encoder, *(other.encoder for other in self)):
            if encoder is not None and encoder.card == card:
                self._serve(instance, encoder)
                return
        task = asyncio.create_task(self._load(instance, card))
        self._loading.add(task)
        task.add_done_callback(self._loading.discard)

    async def _load(self, instance: Instance, card: ModelCard) -> None:
        loop = asyncio.get_running_loop()
        try:
            encoder = await loop.run_in_executor(self._executor, self._make_encoder, card)
        except BadCard as error:
            self._find_fault(instance, card, str(error))
            return
        except Exception as error:
            lane_log.exception("a model card", extra=fields(instance=instance.address))
            what = f"{type(error).__name__}: {error}"
            self._find_fault(instance, card, f"the card of {card.model} cannot be used: {what}")
            return
        if encoder.chat_fault:
            lane_log.warning(
                "%s; chats are refused", encoder.chat_fault, extra=fields(instance=instance.address)
            )
        self._serve(instance, encoder)

    def _find_fault(self, instance: Instance, card: ModelCard, fault: str) -> None:
        if instance.forgotten or instance.told != card or instance.fault:
            return
        instance.fault = fault
        self._set_state(instance, InstanceState.CONNECTING, fault)
        lane_log.error("%s", fault, extra=fields(instance=instance.address))

    def _serve(self, instance: Instance, encoder: PromptEncoder) -> None:
        if instance.forgotten or encoder.card != instance.told:  # came back with another model
            return
        if instance.encoder is not encoder:
            instance.encoder = encoder
            instance.pace = None
            self.snapshot_version += 1
        instance.window.serves(encoder.card.max_running)
        if instance.pace is None:
            instance.pace = StepLearner(encoder.card.max_running, encoder.card.max_step_tokens)
            if instance.stats is not None:  # came with the card
                instance.pace.observe(instance.stats)
        self._judge(instance)

    def _cache_reported(self, instance: Instance, lane: Lane, report: KvReport) -> None:
        """A lane's first report is full; from then on it misses none, or breaks."""
        if instance.reporter is None and report.full:
            instance.reporter = lane
        if lane is instance.reporter:
            self.prefixes.apply(instance.address, report)

    def _lose_reporter(self, instance: Instance) -> None:
        """Read another lane's reports, from a full one on."""
        instance.reporter = None
        self.prefixes.forget(instance.address)
        for lane in instance.lanes:
            if lane.is_open:
                lane.describe()
                return
