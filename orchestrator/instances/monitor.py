"""Watches the instances: processes their lanes' reports and judges them by heartbeats.

Any frame counts as a heartbeat; idle workers send one every 250 ms.
"""

import asyncio
import logging
import math

import msgspec
from prometheus_client import Histogram

from orchestrator.clock import Clock
from orchestrator.instances.instance import Instance, InstanceState
from orchestrator.instances.registry import Registry
from orchestrator.instances.served_models import ServedModels
from orchestrator.lanes import Lane
from orchestrator.lanes.config import DOWN_AFTER_S, SUSPECT_AFTER_S
from orchestrator.prompts.encoder import BadCard, PromptEncoder
from orchestrator.telemetry.log import fields, lane_log
from orchestrator.telemetry.narration import INSTANCE_LACKS, INSTANCE_STATES, SWAPS, narrate
from protocol import Frame, ModelCard, SwapPhase, SwapReport

_WANTED = frozenset({InstanceState.UP, InstanceState.ABSENT})
_NO_MODEL = "unknown model"
"""Triton's message for a model that it was not started with."""
READING_CARD = "its model's tokenizer is being prepared"


class InstanceMonitor:
    """Owns the instances' states, statistics and cards. Every lane reports to it."""

    def __init__(
        self,
        registry: Registry,
        models: ServedModels,
        clock: Clock,
        emission_us: Histogram,
    ) -> None:
        """``emission_us``: time from a frame's decoding to its tokens being written, per token."""
        self._registry = registry
        self._models = models
        self._clock = clock
        self._emission_us = emission_us
        self._loading: set[asyncio.Task[None]] = set()
        self._checked_at = clock.now()

    def close(self) -> None:
        for task in self._loading:
            task.cancel()

    def check_heartbeats(self) -> None:
        """Judge every instance by the age of its last frame; call it about every 250 ms. If this
        process itself is late, frames wait unread and their age is ignored."""
        now = self._clock.now()
        stalled = now - self._checked_at > SUSPECT_AFTER_S
        self._checked_at = now
        if stalled:
            return
        for instance in self._registry:
            self._check(instance)

    # ── what lanes report ────────────────────────────────────────────────────────────────────

    def lane_opened(self, lane: Lane, first: Frame) -> None:
        lane_log.info("lane opened", extra=fields(instance=lane.address))
        self.lane_reported(lane, first)

    def lane_reported(self, lane: Lane, frame: Frame) -> None:
        instance = self._registry.instances[lane.address]
        if frame.swap is not None:
            self._swap_reported(instance, frame.swap)
        if frame.card is not None:
            self._card_received(instance, frame.card)
        if frame.cache is not None:
            # A lane's first report is full, and it misses none after that.
            if instance.reporter is None and frame.cache.full:
                instance.reporter = lane
            if lane is instance.reporter:
                self._registry.prefixes.apply(instance.address, frame.cache)
        if frame.stats is not None:
            instance.take_stats(frame.stats)
            left_ms = frame.stats.drain_left_ms
            instance.worker_drain_ends_at = (
                math.inf if left_ms is None else self._clock.now() + left_ms / 1000
            )
            draining = frame.draining or any(other.is_closing for other in instance.lanes)
            self._set_draining(instance, draining, by_worker=frame.draining)
        if instance.state is InstanceState.SUSPECT:
            self._check(instance)

    def lane_closed(self, lane: Lane, reason: str) -> None:
        instance = self._registry.instances[lane.address]
        absent = _NO_MODEL in reason.lower()
        if reason != instance.reason:  # log an unreachable instance only once
            meant = absent or self._registry.is_closing or instance.removed or lane.is_relieved
            level = logging.INFO if meant else logging.WARNING
            lane_log.log(level, "lane closed: %s", reason, extra=fields(instance=lane.address))
        if not any(other.is_open for other in instance.lanes):
            if instance.state is not InstanceState.UP and not absent:
                self._count_failure(instance)
            instance.forget_stats()
            instance.swap = None  # the next card shows whether it continued
            if absent:
                self._set_state(instance, InstanceState.ABSENT, reason)
            elif instance.state is not InstanceState.DOWN:
                self._set_state(instance, InstanceState.CONNECTING, reason)
        if lane.is_reopening:
            for other in instance.lanes:
                other.reopen()
        if lane is instance.reporter:  # read another lane's reports, starting with a full one
            instance.reporter = None
            self._registry.prefixes.remove(instance.address)
            open_lane = next((each for each in instance.lanes if each.is_open), None)
            if open_lane is not None:
                open_lane.describe()
        instance.reason = reason if instance.state is not InstanceState.UP else ""

    def emission_sampled(self, seconds: float, tokens: int) -> None:
        self._emission_us.observe(1e6 * seconds / tokens)

    # ── states ───────────────────────────────────────────────────────────────────────────────

    def _check(self, instance: Instance) -> None:
        if instance.encoder is None or instance.is_reading_card or instance.fault:
            return
        if not any(lane.is_open for lane in instance.lanes):
            return
        now = self._clock.now()
        silent_s = instance.silent_s(now)
        if silent_s >= DOWN_AFTER_S:
            self._set_state(instance, InstanceState.DOWN, _silence(silent_s))
        elif silent_s >= SUSPECT_AFTER_S:
            self._set_state(instance, InstanceState.SUSPECT, _silence(silent_s))
        elif instance.stats is not None and (stuck_ms := instance.stats.stuck_ms):
            # The worker is alive, and ends itself if the step does not return.
            reason = f"its engine has been in one step for {stuck_ms / 1000:.0f} s"
            self._set_state(instance, InstanceState.SUSPECT, reason)
        else:
            self._set_state(instance, InstanceState.UP, "")
        # A lane can die alone: its jobs must not wait while its siblings are alive.
        for lane in instance.lanes:
            lane.probe()
            if lane.is_open and lane.silent_s(now) >= DOWN_AFTER_S:
                lane.break_off(_silence(lane.silent_s(now)))

    def _set_state(self, instance: Instance, state: InstanceState, reason: str) -> None:
        instance.reason = reason
        if state is instance.state:
            return
        narrate(
            lane_log,
            INSTANCE_STATES[state],
            instance.address,
            logging.INFO if state in _WANTED else logging.WARNING,
            instance=instance.address,
            state=state.value,
            was=instance.state.value,
            reason=reason or None,
            model=instance.model or None,
        )
        if instance.state is InstanceState.UP:
            self._count_failure(instance)
        instance.state = state
        self._registry.changed()

    def _count_failure(self, instance: Instance) -> None:
        if not (self._registry.is_closing or instance.removed or instance.draining):
            instance.health_failures += 1

    def _set_draining(self, instance: Instance, draining: bool, *, by_worker: bool) -> None:
        if draining == instance.draining:
            self._registry.changed(topology=False)
            return
        instance.draining = draining
        if draining and not self._registry.is_closing and not instance.is_swapping:
            lane_log.warning(
                "worker is draining, but this orchestrator did not request it"
                if by_worker
                else "Triton refuses new requests for the model: it is unloaded or shutting down",
                extra=fields(instance=instance.address),
            )
        self._registry.changed()

    def _swap_reported(self, instance: Instance, report: SwapReport) -> None:
        """Process a report of a swap; each lane carries the same."""
        was, instance.swap = instance.swap, report
        if was is not None and was.phase is report.phase and was.model == report.model:
            return
        told = SWAPS.get(report.phase)
        if told is not None:
            level = logging.WARNING if report.phase is SwapPhase.FAILED else logging.INFO
            narrate(
                lane_log,
                told,
                instance.address,
                level,
                instance=instance.address,
                model=report.model,
                was=report.was,
                reason=report.error or None,
            )
        self._registry.changed(topology=False)

    # ── cards ────────────────────────────────────────────────────────────────────────────────

    def _card_received(self, instance: Instance, card: ModelCard) -> None:
        """Prepare the card's tokenizer; the instance is up after that."""
        instance.process_id, instance.greeted_at = card.process_id, self._clock.now()
        card = msgspec.structs.replace(card, process_id="")  # other fields are equal for a model
        if instance.fault and instance.announced_card == card:  # on another lane
            self._set_state(instance, InstanceState.CONNECTING, instance.fault)
            return
        known = instance.announced_card
        if known is not None and known.serving != card.serving:
            instance.stats = None  # the previous model's speed does not apply to this one
        instance.announced_card = card
        instance.fault = ""
        instance.is_reading_card = False
        encoder = instance.encoder
        if encoder is None or encoder.card != card:
            encoder = self._models.encoder_of(card)
        if encoder is not None:
            self._encoder_ready(instance, encoder)
            return
        instance.is_reading_card = True
        if instance.state is not InstanceState.CONNECTING:
            self._set_state(instance, InstanceState.CONNECTING, READING_CARD)
        task = asyncio.create_task(self._load(instance, card))
        self._loading.add(task)
        task.add_done_callback(self._loading.discard)

    async def _load(self, instance: Instance, card: ModelCard) -> None:
        where = fields(instance=instance.address)
        try:
            encoder = await self._models.load(card)
        except BadCard as error:
            self._card_unusable(instance, card, str(error))
            return
        except Exception as error:
            lane_log.exception("model card unusable", extra=where)
            what = f"{type(error).__name__}: {error}"
            self._card_unusable(instance, card, f"the card of {card.model} cannot be used: {what}")
            return
        if encoder.chat_fault:
            lane_log.warning("%s; chats are refused", encoder.chat_fault, extra=where)
        self._encoder_ready(instance, encoder)

    def _card_unusable(self, instance: Instance, card: ModelCard, fault: str) -> None:
        if instance.removed or instance.announced_card != card or instance.fault:
            return
        instance.is_reading_card = False
        instance.fault = fault
        self._set_state(instance, InstanceState.CONNECTING, fault)
        lane_log.error("%s", fault, extra=fields(instance=instance.address))

    def _encoder_ready(self, instance: Instance, encoder: PromptEncoder) -> None:
        # The instance may have returned with another model meanwhile.
        if instance.removed or encoder.card != instance.announced_card:
            return
        instance.provenance = self._models.provenance(encoder.card)
        instance.is_reading_card = False
        was = instance.card
        if instance.take_encoder(encoder):
            if encoder.card.lacks:
                narrate(
                    lane_log,
                    INSTANCE_LACKS,
                    instance.address,
                    instance=instance.address,
                    engine=encoder.card.engine,
                    lacks=",".join(encoder.card.lacks),
                    abort_ms=encoder.card.abort_ms,
                )
            if was is None or was.model_digest != encoder.card.model_digest:
                instance.serves_since = self._clock.now()
            self._registry.changed()
        self._check(instance)


def _silence(silent_s: float) -> str:
    return f"no heartbeat for {silent_s:.1f} s"
