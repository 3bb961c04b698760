"""Takes slots from their submission to their one ending.

They wait here and not at a worker: a slot is sent when an instance has buffers free for it, for
what waits here can still be put in another order, go elsewhere, or end at no cost, and the way to
a worker takes milliseconds of a slot's seconds. No instance is left with free buffers while
something waits that it could finish in time.
"""

import asyncio
import random
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.clock import Clock
from orchestrator.errors import (
    DeadlineInfeasible,
    Draining,
    InstanceLost,
    InvalidRequest,
    NotReady,
    QueueFull,
    TidegateError,
)
from orchestrator.lanes import LaneConfig
from orchestrator.slots.attempt import Attempt
from orchestrator.slots.fleet import SlotFleet, SlotInstance
from orchestrator.slots.forecast import (
    NOMINAL_ABILITY,
    Begun,
    Expected,
    Line,
    Wish,
    alone_s,
    best_plan,
    forecast,
    place,
)
from orchestrator.slots.gate import SlotGate
from orchestrator.slots.job import SlotJob
from orchestrator.slots.ledger import SlotLedger
from orchestrator.slots.slot import Slot, SlotStage
from orchestrator.slots.store import SlotStore
from orchestrator.slots.verdicts import (
    TO_BE_SENT_AGAIN,
    aborted,
    code_of,
    failed,
    judged,
    overdue,
    refused,
    rendered,
)
from orchestrator.tasks.job import OnDisconnect
from orchestrator.telemetry.log import fields, service_log
from orchestrator.telemetry.narration import DISCONNECTED, RETRIED, TOO_SLOW, narrate
from worker.protocol import AbortCause, excerpt

FORECAST_TTL_S = 0.05
"""What is told of those that wait is worked out this often at most."""


@dataclass(frozen=True, slots=True)
class SlotsConfig:
    """``attempts``: how often a slot is sent at most. ``grace_s``: how long past a deadline a
    worker may still report it."""

    queue_size: int
    attempts: int
    grace_s: float
    lane: LaneConfig


class Slots:
    """Every slot of one orchestrator."""

    def __init__(
        self,
        gate: SlotGate,
        fleet: SlotFleet,
        ledger: SlotLedger,
        store: SlotStore,
        config: SlotsConfig,
        clock: Clock,
        rng: random.Random,
    ) -> None:
        """``rng`` makes ids: whoever knows one can fetch its files, with the right key."""
        self.fleet = fleet
        self.ledger = ledger
        self.store = store
        self.on_end: Callable[[], None] = _nothing
        """Called whenever a slot has ended."""
        self._gate = gate
        self._config = config
        self._clock = clock
        self._rng = rng
        self._live: set[Slot] = set()
        self._waiting: list[Slot] = []
        """The one that must start first is first."""
        self._wishes: dict[Slot, Wish] = {}
        self._expected: dict[Slot, Expected | None] = {}
        self._expected_at = -1.0
        self._passing = False
        fleet.on_change = self._pass

    # ── for clients ──────────────────────────────────────────────────────────────────────────

    def submit(self, job: SlotJob) -> Slot:
        """Offer a slot. Returns once it waits or is on its way; raises why it was refused.

        Whatever happens, it is counted as offered and ends in exactly one outcome.
        """
        slot = Slot(uuid.UUID(int=self._rng.getrandbits(128), version=4).hex, job)
        self.ledger.offered.inc()
        self._live.add(slot)
        slot.on_end.append(self._ended)
        try:
            self._admit(slot)
        except TidegateError as error:
            self.ledger.settle(slot, refused(error))
            error.due_at = slot.deadline.at
            raise
        except Exception:
            service_log.exception(
                "admission of a slot failed", extra=fields(correlation_id=job.correlation_id)
            )
            internal = TidegateError("an internal error occurred")
            self.ledger.settle(slot, failed(internal))
            raise internal from None
        self.store.add(slot)
        slot.timer = self._clock.call_at(
            slot.deadline.at + self._config.grace_s, lambda: self._overdue(slot)
        )
        self._queue(slot)
        self._pass()
        return slot

    def cancel(self, slot: Slot) -> None:
        """Stop a slot for whoever asked through the API. Idempotent (WP-2)."""
        self.ledger.settle(slot, aborted(AbortCause.CANCEL))

    def disconnected(self, slot: Slot, *, too_slow: bool = False) -> None:
        """The slot's client is gone; what becomes of it its job says (WP-1)."""
        if slot.ending is not None:
            return
        narrate(
            service_log,
            TOO_SLOW if too_slow else DISCONNECTED,
            "slot",
            slot_id=slot.id,
            correlation_id=slot.job.correlation_id,
        )
        if slot.job.on_disconnect is OnDisconnect.CANCEL:
            self.ledger.settle(slot, aborted(AbortCause.DISCONNECT))

    def queue_position(self, slot: Slot) -> int:
        """How many slots start before this one, and itself; 0 once it is on its way."""
        return self._waiting.index(slot) + 1 if slot.stage is SlotStage.QUEUED else 0

    def expected(self, slot: Slot) -> Expected | None:
        """What will become of it; None where nothing can be said."""
        now = self._clock.now()
        if slot.ending is not None:
            return None
        if isinstance(slot.attempt, Attempt):
            return self._expected_there(slot.attempt, now)
        if now - self._expected_at > FORECAST_TTL_S or slot not in self._expected:
            lines = self._lines(now)
            found = forecast((self._wishes[each] for each in self._waiting), lines) if lines else []
            self._expected = dict(zip(self._waiting, found, strict=False))
            self._expected_at = now
        return self._expected.get(slot)

    def predicted_ms(self, slot: Slot) -> float | None:
        """From now to its clip; None where nothing can be said."""
        found = self.expected(slot)
        return None if found is None else max(0.0, 1000 * (found.finish_at - self._clock.now()))

    # ── for the service ──────────────────────────────────────────────────────────────────────

    @property
    def live(self) -> int:
        """Slots that have not ended."""
        return len(self._live)

    @property
    def waiting(self) -> int:
        """Those of them that no instance has."""
        return len(self._waiting)

    def start(self) -> None:
        """Look for instances with the slot model from now on."""
        self.fleet.start()

    def upkeep(self) -> None:
        """Judge silences, forget what is old, end what is hopeless; call it every 250 ms or so."""
        self.fleet.check_heartbeats()
        self.store.prune()
        self._pass()

    def end_all(self) -> None:
        """End every live slot: the service is going down."""
        for slot in list(self._live):
            self.ledger.settle(
                slot, failed(Draining("the service is going down; try again elsewhere"))
            )

    async def close(self) -> None:
        """Close every stream; workers stop whatever still goes on."""
        runners = [attempt.runner for instance in self.fleet for attempt in instance.attempts]
        for runner in runners:
            runner.cancel()
        await asyncio.gather(*runners, return_exceptions=True)
        await self.fleet.close()

    # ── as the attempts' sink ────────────────────────────────────────────────────────────────

    def finished(self, attempt: Attempt) -> None:
        slot = attempt.slot
        self.ledger.settle(slot, rendered(slot, self._clock.now()))

    def refused(self, attempt: Attempt, error: str) -> None:
        slot, now = attempt.slot, self._clock.now()
        code, message = code_of(error)
        if code is None or code in TO_BE_SENT_AGAIN:
            self._again(attempt, judged(slot, code, message, now).error, now)
        else:
            self.ledger.settle(slot, judged(slot, code, message, now))

    def lost(self, attempt: Attempt, reason: str) -> None:
        service_log.warning(
            "a slot's instance was lost: %s",
            reason,
            extra=fields(instance=attempt.address, correlation_id=attempt.slot.job.correlation_id),
        )
        error = InstanceLost("the instance that worked on this was lost; try again")
        self._again(attempt, error, self._clock.now())

    # ── admission ────────────────────────────────────────────────────────────────────────────

    def _admit(self, slot: Slot) -> None:
        """Raises what refuses it, the cheapest reason first."""
        self._gate.enter(slot)
        ready = self.fleet.ready()
        if not ready:
            raise NotReady("no instance that renders slots is ready; try again shortly")
        now = self._clock.now()
        wish = Wish(slot.job.recipe, slot.deadline.at, degrade=slot.job.degrade)
        self._require_providers(wish, ready)
        slot.start_by = max(wish.start_by(instance.ability) for instance in ready)
        if len(self._waiting) >= self._config.queue_size and not any(i.free for i in ready):
            first = min(line.free_at for line in self._lines(now).values())
            raise QueueFull(
                f"{len(self._waiting)} slots wait already",
                retry_after_ms=max(1000.0, 1000 * (first - now)),
            )
        if self._gate.predicts:
            self._require_feasible(slot, wish, now)
        self._wishes[slot] = wish

    def _require_feasible(self, slot: Slot, wish: Wish, now: float) -> None:
        """Raise unless it can be in time, and lets those be so that were let in before."""
        place_in_line = sum(1 for other in self._waiting if other.start_by <= slot.start_by)
        others = [self._wishes[other] for other in self._waiting]
        with_it = [*others[:place_in_line], wish, *others[place_in_line:]]
        found = forecast(with_it, self._lines(now))
        own = found[place_in_line]
        assert own is not None, "somebody has its providers"
        if not own.is_in_time:
            raise self._infeasible(wish, own, now)
        behind = found[place_in_line + 1 :]
        if all(map(_is_in_time, behind)):
            return
        without = forecast(others, self._lines(now))[place_in_line:]
        pairs = zip(behind, without, strict=True)
        if any(_is_in_time(alone) and not _is_in_time(with_it) for with_it, alone in pairs):
            raise self._infeasible(wish, own, now, others_first=True)

    def _require_providers(self, wish: Wish, ready: list[SlotInstance]) -> None:
        """Raise unless one of ``ready`` has all that the recipe names."""
        missing = [instance.ability.missing(wish.chosen) for instance in ready]
        stage = missing[0]
        if stage is None or None in missing:
            return
        known = {name for one in ready for name in one.ability.others.get(stage, {})}
        field = f"recipe.providers.{stage.name.lower()}"
        raise InvalidRequest(
            f"{field}: no instance has {excerpt(wish.chosen[stage])} with what else is named; "
            f"there is: {', '.join(sorted(known))}",
            field=field,
        )

    def _infeasible(
        self, wish: Wish, found: Expected, now: float, *, others_first: bool = False
    ) -> DeadlineInfeasible:
        """Why, and which deadline would do."""
        instance = self.fleet.instances[found.address]
        ability = instance.ability
        idle = Line(ability, now, ())
        fits_idle = best_plan(wish, idle)[2]
        binding = "queue" if fits_idle else wish.longest_stage(found.plan, ability).value
        finish_at = found.finish_at + ability.buffer_s
        left_s = max(0.0, wish.deadline_at - now)
        if others_first:
            finish_at = max(line.free_at for line in self._lines(now).values())
            finish_at += alone_s(ability.work(found.plan, wish.chosen)) + ability.buffer_s
            why = "slots that were let in before it could not be in time with it"
        else:
            why = f"it would be done after {finish_at - now:.1f} s at the least"
        return DeadlineInfeasible(
            f"{left_s:.1f} s until the deadline are too little: {why}, of which "
            f"{ability.buffer_s:g} s are kept back",
            predicted_finish_ms=1000 * (finish_at - now),
            earliest_feasible_unix_ms=round(1000 * (self._clock.unix() + finish_at - now)),
            binding_constraint=binding,
        )

    # ── the queue ────────────────────────────────────────────────────────────────────────────

    def _queue(self, slot: Slot) -> None:
        at = sum(1 for other in self._waiting if other.start_by <= slot.start_by)
        self._waiting.insert(at, slot)
        self._expected_at = -1.0

    def _pass(self) -> None:
        """End what is certain to miss; send whatever has somewhere to go."""
        if self._passing:  # what happens in a pass may ask for another
            return
        self._passing = True
        try:
            now = self._clock.now()
            for slot in list(self._waiting):
                if slot.ending is None and not self._is_hopeless(slot, now):
                    self._start_somewhere(slot, now)
        except Exception:
            service_log.exception("a pass over waiting slots failed; will retry")
        finally:
            self._passing = False

    def _is_hopeless(self, slot: Slot, now: float) -> bool:
        """Whether nothing that there is could finish the least of it, which then ends."""
        if not self._gate.predicts:
            return False
        abilities = [instance.ability for instance in self.fleet.seen()] or [NOMINAL_ABILITY]
        wish = self._wishes[slot]
        slot.start_by = max(wish.start_by(ability) for ability in abilities)
        if now <= slot.start_by:
            return False
        if slot.loss is not None:
            self.ledger.settle(slot, failed(slot.loss))
            return True
        lines = {one.address: Line(one.ability, now, ()) for one in self.fleet.seen()}
        found = place(wish, lines)
        error = NotReady("no instance that could render this is left; try again shortly")
        self.ledger.settle(
            slot, refused(error if found is None else self._infeasible(wish, found, now))
        )
        return True

    def _start_somewhere(self, slot: Slot, now: float) -> None:
        free = [instance for instance in self.fleet.ready() if instance.free]
        better = [instance for instance in free if instance.address not in slot.failed_on]
        lines = {instance.address: instance.line(now) for instance in better or free}
        if not lines:
            return
        found = place(self._wishes[slot], lines)
        if found is not None and (found.is_in_time or not self._gate.predicts):
            self._send(slot, self.fleet.instances[found.address], found, now)

    def _send(self, slot: Slot, instance: SlotInstance, found: Expected, now: float) -> None:
        self._waiting.remove(slot)
        slot.dispatched(instance.address, now)
        work = instance.ability.work(found.plan, self._wishes[slot].chosen)
        begun = Begun(found.plan, work, slot.percents)
        attempt = Attempt(slot, instance.address, begun, self, self._clock)
        slot.attempt = attempt
        instance.attempts.append(attempt)
        self.fleet.count(instance.address)
        attempt.start(self._config.lane)
        attempt.runner.add_done_callback(lambda _: self._left(instance, attempt))
        self._expected_at = -1.0

    def _left(self, instance: SlotInstance, attempt: Attempt) -> None:
        """An instance has one slot of ours less."""
        if attempt in instance.attempts:
            instance.attempts.remove(attempt)
        self.fleet.count(instance.address)
        self._pass()

    def _again(self, attempt: Attempt, error: TidegateError | None, now: float) -> None:
        """Send it to another instance while the deadline can hold that, or end it."""
        slot = attempt.slot
        if slot.ending is not None:
            return
        slot.attempts += 1
        slot.failed_on |= {attempt.address}
        slot.loss = error or InstanceLost("the instance could not go on with this")
        if slot.attempts >= self._config.attempts or slot.deadline.left_ms(now) <= 0:
            self.ledger.settle(slot, failed(slot.loss))
            return
        slot.requeued()
        self.ledger.retries.inc()
        narrate(
            service_log,
            RETRIED,
            "slot",
            slot_id=slot.id,
            correlation_id=slot.job.correlation_id,
            instance=attempt.address,
        )
        self._queue(slot)
        if not self._is_hopeless(slot, now):
            self._pass()

    # ── ends ─────────────────────────────────────────────────────────────────────────────────

    def _overdue(self, slot: Slot) -> None:
        self.ledger.settle(slot, overdue(slot, self._clock.now()))

    def _ended(self, slot: Slot) -> None:
        self._live.discard(slot)
        self._wishes.pop(slot, None)
        if slot in self._waiting:
            self._waiting.remove(slot)
        self._expected.pop(slot, None)
        self._expected_at = -1.0
        self.on_end()

    # ── what is to come ──────────────────────────────────────────────────────────────────────

    def _lines(self, now: float) -> dict[str, Line]:
        return {instance.address: instance.line(now) for instance in self.fleet.ready()}

    def _expected_there(self, attempt: Attempt, now: float) -> Expected:
        """Of one that an instance has: those that it was given before come first."""
        instance = self.fleet.instances.get(attempt.address)
        before = [] if instance is None else instance.attempts
        at = before.index(attempt) if attempt in before else len(before)
        ability = NOMINAL_ABILITY if instance is None else instance.ability
        line = Line(ability, now, [other.begun for other in before[:at]])
        finish_at = line.finish(attempt.begun.left())
        return Expected(attempt.address, attempt.begun.plan, finish_at, True)


def _is_in_time(expected: Expected | None) -> bool:
    return expected is not None and expected.is_in_time


def _nothing() -> None:
    pass
