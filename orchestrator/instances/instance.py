"""One Triton instance: its lanes, model, load and state.

The state follows the lanes (OR-6); ``InstanceMonitor`` sets it::

    CONNECTING ──card, tokenizer ready──▶ UP ◀──frame── SUSPECT ──silent 3 s──▶ DOWN
         ▲                                └──silent 1 s──▶┘                       │
         └───────────────────── every lane closed, tries again ◀──────────────────┘

An instance with an unusable card has a ``fault``: it stays CONNECTING until another card arrives.
"""

import math
from collections import deque
from dataclasses import replace
from enum import StrEnum

from orchestrator.instances.candidate import Candidate, read_capability
from orchestrator.instances.concurrency import ConcurrencyLimit
from orchestrator.instances.provenance import UNKNOWN
from orchestrator.lanes import Lane, kind_of
from orchestrator.prediction.step_learner import StepLearner
from orchestrator.prediction.step_model import Load, StepModel
from orchestrator.prompts.encoder import PromptEncoder
from protocol import Feature, ModelCard, SwapPhase, SwapReport, WorkerStats

LANE_SILENT_S = 0.6
"""Seconds (about two heartbeats) by which a lane's last frame may be older than its siblings'
latest; beyond that, the lane is the last to get work."""

CANDIDATE_TTL_S = 0.05
"""Seconds after which a candidate is rebuilt even if its key has not changed."""

FIRST_ROUND_TRIP_MS = 5.0
_ROUND_TRIPS = 24


class InstanceState(StrEnum):
    """States of an instance; only ``up`` instances get work."""

    ABSENT = "absent"
    """Triton answers but has no text model: it renders clips, or will load one."""
    CONNECTING = "connecting"
    UP = "up"
    SUSPECT = "suspect"
    DOWN = "down"


class Instance:
    """The known state of one Triton. ``Registry`` writes ``lanes``, ``cordoned``,
    ``retiring_since`` and ``removed``, dispatch reports its jobs to ``concurrency`` and
    ``round_trip_ms``, and the monitor writes everything else."""

    def __init__(self, address: str, max_backlog: int = 0, entry: str = "") -> None:
        self.address = address
        self.entry = entry or address
        """The address in the settings or a source: a URL for another kind of server."""
        self.kind = kind_of(self.entry)
        self.concurrency = ConcurrencyLimit(max_backlog)
        self.lanes: list[Lane] = []
        self.reporter: Lane | None = None
        """The lane whose prefix cache reports are read; all lanes carry the same ones."""
        self.state = InstanceState.CONNECTING
        self.reason = "not reached yet"
        """Why the instance is not up; empty if it is."""
        self.fault = ""
        """Why its last card is unusable, which waiting cannot fix; empty if usable."""
        self.draining = False
        """Whether the worker itself takes no new work."""
        self.worker_drain_ends_at = math.inf
        """When the worker ends its running work, in seconds of the clock; inf unless it drains."""
        self.cordoned = False
        """Whether an operator has stopped new work for it."""
        self.cordon_ends_at = math.inf
        """When its running work must have ended, in seconds of the clock; inf for no limit."""
        self.retiring_since: float | None = None
        """When discovery stopped listing it, in seconds of the clock; None while it is listed."""
        self.removed = False
        """Whether its lanes are closed or being closed."""
        self.announced_card: ModelCard | None = None
        """The last received card; ``card`` follows when its tokenizer is ready."""
        self.process_id = ""
        """Id of its worker's process from the last card; empty if it has none."""
        self.greeted_at = 0.0
        """When the last card arrived, in seconds of the clock."""
        self.is_reading_card = False
        """Whether the announced card's tokenizer is still being prepared."""
        self.swap: SwapReport | None = None
        """The latest report of a model swap; None if there is none."""
        self.serves_since = 0.0
        """When it started to serve its present model, in seconds of the clock."""
        self.encoder: PromptEncoder | None = None
        self.provenance = UNKNOWN
        self.stats: WorkerStats | None = None
        self.step_learner: StepLearner | None = None
        """Learns its speed; None until its card is known."""
        self.round_trip_ms = deque([FIRST_ROUND_TRIP_MS] * 9, maxlen=_ROUND_TRIPS)
        """Ms that ended jobs took beyond the worker's own times."""
        self.share: int | None = None
        """Maximum number of our jobs with a slot there; None if all slots are ours."""
        self.foreign_load = 0
        """Number of other orchestrators' jobs on the worker, by its last statistics."""
        self.clips_running = 0
        """Number of our clips that it renders."""
        self.other_work = ""
        """A room's work on it, in one word, which needs no text model."""
        self.health_failures = 0
        """Number of times that it stopped being up or was unreachable."""
        self._candidate: tuple[object, Candidate] | None = None
        self._candidate_until = 0.0
        self._pace: StepModel | None = None
        self._pace_of: StepModel | None = None

    @property
    def drain_ends_at(self) -> float:
        return min(self.worker_drain_ends_at, self.cordon_ends_at)

    @property
    def card(self) -> ModelCard | None:
        return None if self.encoder is None else self.encoder.card

    @property
    def model(self) -> str:
        """The name of its model; empty until its card is known."""
        return "" if self.encoder is None else self.encoder.card.model

    def can_load(self, model: str) -> bool:
        return self.card is not None and any(one.name == model for one in self.card.loadable)

    @property
    def is_for_other_work(self) -> bool:
        """Whether it is healthy although it has no text model."""
        return self.state is InstanceState.ABSENT and bool(self.other_work)

    def describe_state(self) -> dict[str, object]:
        if self.is_for_other_work:
            return {"state": self.other_work, "reason": ""}
        return {"state": self.state.value, "reason": self.reason}

    @property
    def has_said(self) -> bool:
        """Whether its model is known: a model, none, or an unusable one."""
        is_absent = self.state is InstanceState.ABSENT
        return self.encoder is not None or is_absent or bool(self.fault) or self.removed

    @property
    def chat_fault(self) -> str:
        """Why it takes only plain prompts; empty if it takes chats or has no card yet."""
        return "" if self.encoder is None else self.encoder.chat_fault

    @property
    def is_swapping(self) -> bool:
        """Whether its worker is swapping models and an open lane will report the end."""
        ended = (SwapPhase.DONE, SwapPhase.FAILED)
        return (
            self.swap is not None
            and self.swap.phase not in ended
            and any(lane.is_open for lane in self.lanes)
        )

    @property
    def is_out_of_use(self) -> bool:
        return self.removed or self.cordoned or self.retiring_since is not None

    def is_to_serve(self, model: str) -> bool:
        """Whether it will take work for ``model`` after its swap."""
        if self.is_out_of_use:
            return False
        if self.is_reading_card and self.announced_card is not None:
            return self.announced_card.model == model
        return self.is_swapping and self.swap is not None and self.swap.model == model

    def may_speak_again(self, model: str) -> bool:
        """Whether it serves ``model`` and has been silent only a little longer than usual."""
        return (
            self.state is InstanceState.SUSPECT
            and self.model == model
            and not (self.is_out_of_use or self.draining)
        )

    @property
    def is_up(self) -> bool:
        return (
            self.state is InstanceState.UP
            and not self.removed
            and any(lane.is_open for lane in self.lanes)
        )

    @property
    def ready(self) -> bool:
        return (
            self.state is InstanceState.UP
            and not (self.is_out_of_use or self.draining)
            and any(lane.is_open and not lane.is_closing for lane in self.lanes)
        )

    @property
    def is_reopening(self) -> bool:
        """Whether it will take new work soon, because its model was reloaded."""
        return any(lane.is_reopening for lane in self.lanes) and not self.is_out_of_use

    @property
    def lane_load(self) -> int:
        return sum(lane.load for lane in self.lanes)

    @property
    def load(self) -> int:
        return self.lane_load - self.concurrency.paused + self.foreign_load

    def _ours(self, most: int) -> int:
        """At most ``most`` jobs there, ours and others', limited by our share of the slots."""
        return most if self.share is None else min(most, self.foreign_load + self.share)

    @property
    def own_slots(self) -> int:
        slots = self.concurrency.slots
        return slots if self.share is None else min(slots, self.share)

    @property
    def slots(self) -> int:
        return self._ours(self.concurrency.slots)

    @property
    def limit(self) -> int:
        return self._ours(self.concurrency.limit)

    @property
    def has_free_slot(self) -> bool:
        return self.load < self.slots

    @property
    def has_waiting(self) -> bool:
        return self.load > self.concurrency.fitting

    @property
    def can_pause(self) -> bool:
        return self.card is not None and self.card.can_pause

    @property
    def occupancy(self) -> Load:
        """The number of its jobs, without their outstanding work (``outstanding_work``). On the
        simulator (one minute, twice the capacity) ``outstanding_work`` here took goodput from
        31.0/s to 20.4 and waste to 22 %."""
        slots = 1 if self.card is None else self.card.max_running
        running = min(self.load, slots)
        return Load(running, self.load - running, prefill_tokens=0, decode_tokens=0)

    @property
    def pace(self) -> StepModel:
        """The step model with the number of slots to use. Its card must be known."""
        assert self.step_learner is not None
        model, slots = self.step_learner.model, self.slots
        if slots >= model.slots:
            return model
        if self._pace is None or self._pace.slots != slots or self._pace_of is not model:
            self._pace, self._pace_of = replace(model, slots=slots), model
        return self._pace

    def candidate(self, encoder: PromptEncoder, is_admitted: bool, now: float) -> Candidate:
        """The snapshot for placement at ``now``. Cached briefly while nothing changes.
        ``is_admitted``: whether its circuit breaker admits work."""
        ready = is_admitted and self.ready
        learner, jobs = self.step_learner, self.concurrency
        model = None if learner is None or not learner.is_measured else learner.model
        load, limit, slots, is_up = self.load, self.limit, self.slots, self.is_up
        rows = jobs.most_rows, jobs.batch, jobs.clearing > 0
        key = load, ready, is_up, limit, slots, rows, self.stats, model
        if self._candidate is not None and now < self._candidate_until:
            known, candidate = self._candidate
            if known == key:
                return candidate
        card, stats = encoder.card, self.stats
        max_tokens = card.context_tokens
        if stats is not None and stats.kv_blocks_total:
            max_tokens = min(max_tokens, stats.kv_blocks_total * card.block_tokens)
        candidate = Candidate(
            name=self.address,
            model=card.model,
            vocabulary=encoder.vocabulary,
            ready=ready,
            limit=limit,
            slots=slots,
            max_running=card.max_running,
            most_rows=jobs.most_rows,
            batch=jobs.batch,
            is_clearing=jobs.clearing > 0,
            is_up=is_up,
            load=load,
            max_tokens=max_tokens,
            kv_free=0 if stats is None else stats.kv_blocks_free,
            step=None if model is None else self.pace.under(jobs.outstanding_work(load)),
            device=card.device,
            model_digest=card.model_digest,
            can_continue=card.can_continue,
            lacks=frozenset((*card.all_lacks, *(() if card.grammars else (Feature.GRAMMAR,)))),
            adapters=frozenset(card.adapters),
            abort_ms=card.abort_ms,
            quantization=card.quantization,
            vram_bytes=card.vram_bytes,
            compute_capability=read_capability(card.compute_capability),
            device_mask=card.device_mask,
            provenance=self.provenance,
        )
        self._candidate, self._candidate_until = (key, candidate), now + CANDIDATE_TTL_S
        return candidate

    def best_lane(self) -> Lane:
        """The open lane with the fewest jobs among those with a recent frame."""
        lanes = [lane for lane in self.lanes if lane.is_open and not lane.is_closing]
        freshest = max(lane.last_frame_at for lane in lanes)

        def rank(lane: Lane) -> tuple[bool, bool, int]:
            return freshest - lane.last_frame_at > LANE_SILENT_S, lane.is_relieved, lane.load

        return min(lanes, key=rank)

    def silent_s(self, now: float) -> float:
        """Seconds since the last frame on an open lane; 0 if none is open."""
        return min((lane.silent_s(now) for lane in self.lanes if lane.is_open), default=0.0)

    # ── for the monitor ──────────────────────────────────────────────────────────────────────

    def take_stats(self, stats: WorkerStats) -> None:
        self.stats = stats
        self.concurrency.observe(stats)
        if self.step_learner is not None:
            self.step_learner.observe(stats)
        ours, paused = self.lane_load, self.concurrency.paused
        active = stats.running + stats.waiting
        # Statistics older than our last pause or resume must count no job twice; others' paused
        # jobs hold no slot.
        self.foreign_load = max(0, min(active + stats.paused - ours, active - (ours - paused)))

    def take_encoder(self, encoder: PromptEncoder) -> bool:
        """Use the encoder of the announced card. True if it is another one than before."""
        is_new = self.encoder is not encoder
        if is_new:
            self.encoder = encoder
            self.step_learner = None
            self._candidate = None  # it may be of another model
        self.concurrency.set_max_running(encoder.card.max_running)
        if self.step_learner is None:
            self.step_learner = StepLearner(
                encoder.card.max_running, encoder.card.max_step_tokens, encoder.card.step_costs
            )
            if self.stats is not None:  # came with the card
                self.step_learner.observe(self.stats)
        return is_new

    def forget_stats(self) -> None:
        self.stats = None
        self.foreign_load = 0
        self.draining = False
        self.worker_drain_ends_at = math.inf
