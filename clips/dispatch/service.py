"""Handles clips from submission to their single end.

Clips wait here and not at a worker: a clip is sent when an instance has free buffers for it. A
waiting clip can still be reordered, go to another instance, or end at no cost. The way to a worker
takes only milliseconds; a clip takes seconds. No instance keeps free buffers while a clip waits
that it could finish in time.
"""

import asyncio
from collections.abc import Callable
from typing import Final

from clips.dispatch.admission import ClipAdmission
from clips.dispatch.attempt import AttemptLost, ClipAttempt
from clips.dispatch.fleet import ClipFleet, ClipInstance
from clips.dispatch.forecast import NOMINAL_ABILITY, Begun, Expected, InstanceTimeline, place
from clips.dispatch.ledger import ClipLedger
from clips.dispatch.task import (
    TO_BE_SENT_AGAIN,
    ClipJob,
    ClipTask,
    code_of,
    judged,
    overdue,
    rendered,
)
from clips.dispatch.waiting import WaitingClips
from clips.dispatch.wire import is_absence
from orchestrator.dispatch.retry import ATTEMPTS
from orchestrator.errors import Draining, InstanceLost, TidegateError
from orchestrator.extension import Core
from orchestrator.ids import Ids
from orchestrator.prediction.metrics import refusals
from orchestrator.retention import KeptStore, Retention
from orchestrator.tasks.deadline import REPORT_GRACE_S
from orchestrator.tasks.verdicts import aborted, failed, refused
from orchestrator.telemetry.log import fields, service_log
from orchestrator.telemetry.metrics import MetricRow
from orchestrator.telemetry.narration import RETRIED, narrate
from protocol import AbortCause, Code

KEPT: Final = Retention(keep_count=200, keep_s=600.0, keep_bytes=256 * 2**20)
"""Number of ended clips to keep, with their files, for late downloads."""


class Clips:
    """Every clip of one orchestrator."""

    def __init__(self, core: Core) -> None:
        self.fleet = ClipFleet(core)
        self.ledger = ClipLedger(core.metrics, core.clock)
        self.store: KeptStore[ClipTask] = KeptStore(core.clock, KEPT, "slot")
        self.on_end: Callable[[], None] = lambda: None
        """Called whenever a clip has ended."""
        self._core = core
        self._clock = core.clock
        self._lanes = core.settings.lanes
        self._ids = Ids(core.rng, core.sharing.tag)
        self._live: set[ClipTask] = set()
        self.waiting = WaitingClips(self.fleet, core.clock)
        self._admission = ClipAdmission(
            self.fleet, self.waiting, core.clock, core.rng, core.settings.admission.feasibility
        )
        self.refusals = self._admission.stats
        """Counts of refusals and of the sample's outcomes (DL-17)."""
        self._passing = False
        self.fleet.on_change = self._pass
        core.metrics.watch(self, _ROWS)
        core.metrics.keeps("slots", self.store.kept)
        core.metrics.watch(self.refusals, refusals("slot_", "slots"))

    # ── for clients ──────────────────────────────────────────────────────────────────────────

    def submit(self, job: ClipJob) -> ClipTask:
        """Submit a clip. Returns once it waits or was sent; raises the error that refuses it.

        In every case, it counts as offered and has exactly one outcome.
        """
        clip = ClipTask(self._ids.new(), job)
        self.ledger.offered.inc()
        self._live.add(clip)
        clip.on_end.append(self._ended)
        try:
            self._core.admission.begin(clip)
            self._core.limiter.begin(clip)
            self._admission.admit(clip)
        except TidegateError as error:
            self.ledger.settle(clip, refused(error))
            error.due_at = clip.deadline.at
            raise
        except Exception:
            service_log.exception(
                "admission of a slot failed", extra=fields(correlation_id=job.correlation_id)
            )
            internal = TidegateError("an internal error occurred")
            self.ledger.settle(clip, failed(internal))
            raise internal from None
        self.store.add(clip)
        clip.timer = self._clock.call_at(
            clip.deadline.at + REPORT_GRACE_S,
            lambda: self.ledger.settle(clip, overdue(clip, self._clock.now())),
        )
        self.waiting.add(clip)
        self._pass()
        return clip

    def cancel(self, clip: ClipTask) -> None:
        """Stop a clip for a client that asked through the API. Idempotent (WP-2)."""
        self.ledger.settle(clip, aborted(AbortCause.CANCEL))

    def disconnected(self, clip: ClipTask, *, too_slow: bool = False) -> None:
        """Handle a disconnect of the clip's client, as its job says (WP-1)."""
        if clip.client_gone(too_slow=too_slow):
            self.ledger.settle(clip, aborted(AbortCause.DISCONNECT))

    def expected(self, clip: ClipTask) -> Expected | None:
        """Forecast for ``clip``; None if there is none."""
        if clip.ending is not None:
            return None
        if clip.attempt is not None:
            return self._expected_there(clip.attempt, self._clock.now())
        return self.waiting.expected(clip)

    def predicted_ms(self, clip: ClipTask) -> float | None:
        """Ms from now until the clip is done, rounded; None without a forecast."""
        found, now = self.expected(clip), self._clock.now()
        return None if found is None else round(max(0.0, 1000 * (found.finish_at - now)), 1)

    def given_up(self, clip: ClipTask, expected: Expected) -> tuple[str, ...]:
        """Parts of ``clip`` that will probably be dropped; empty while no pace is known, because
        then the complete clip starts."""
        instance = self.fleet.instances.get(expected.address)
        if instance is not None and not clip.needs.is_known(instance.ability):
            return ()
        return expected.plan.given_up

    # ── for the service ──────────────────────────────────────────────────────────────────────

    @property
    def live(self) -> list[ClipTask]:
        return list(self._live)

    def upkeep(self) -> None:
        """Check for silence, forget old clips, end hopeless ones; call it about every 250 ms."""
        self.fleet.check_heartbeats()
        self.store.prune()
        self._pass()

    def end_hopeless(self, at: float) -> int:
        """End waiting clips that will not be done by ``at``, the end of the service, so that their
        clients can try elsewhere. Returns their number."""
        late = [
            clip
            for clip in self.waiting
            if (found := self.waiting.expected(clip)) is None or found.finish_at > at
        ]
        self._drain(late)
        return len(late)

    def end_all(self) -> None:
        """End every live clip, because the service is shutting down."""
        self._drain(self.live)

    def _drain(self, clips: list[ClipTask]) -> None:
        for clip in clips:
            self.ledger.settle(clip, failed(Draining("the service is shutting down; use another")))

    async def close(self) -> None:
        """Close every stream; workers stop what still runs."""
        attempts = [attempt for instance in self.fleet for attempt in instance.attempts]
        for attempt in attempts:
            attempt.stop()
        runners = (attempt.runner for attempt in attempts if attempt.runner is not None)
        await asyncio.gather(*runners, return_exceptions=True)
        await self.fleet.close()

    # ── attempts ─────────────────────────────────────────────────────────────────────────────

    async def _attempt(self, attempt: ClipAttempt) -> None:
        """Have an instance render a clip, and act on the end."""
        clip = attempt.clip
        try:
            error = await attempt.run(self._lanes)
        except AttemptLost as lost:
            clip.attempt = None
            self._lost(attempt, str(lost))
            return
        clip.attempt = None
        if error:
            self._refused(attempt, error)
            return
        now = self._clock.now()
        self._count_stop(clip, None, now)
        self.ledger.settle(clip, rendered(clip, now))

    def _refused(self, attempt: ClipAttempt, error: str) -> None:
        clip, now = attempt.clip, self._clock.now()
        code, message = code_of(error)
        instance = self.fleet.instances.get(attempt.address)
        if is_absence(error):
            self.fleet.gone(attempt.address)
        elif code is Code.NO_CAPACITY and instance is not None:
            instance.others = instance.ability.slots  # full, until it reports another state
        if code is None or code in TO_BE_SENT_AGAIN:
            self._again(attempt, judged(clip, code, message, now).error, now)
        else:
            self._count_stop(clip, code, now)
            self.ledger.settle(clip, judged(clip, code, message, now))

    def _lost(self, attempt: ClipAttempt, reason: str) -> None:
        service_log.warning(
            "a slot's instance was lost: %s",
            reason,
            extra=fields(instance=attempt.address, correlation_id=attempt.clip.job.correlation_id),
        )
        error = InstanceLost("the instance that worked on this was lost; try again")
        self._again(attempt, error, self._clock.now())

    # ── the queue ────────────────────────────────────────────────────────────────────────────

    def _pass(self) -> None:
        """End clips that are certain to miss; send every clip that an instance can take."""
        if self._passing or not self.waiting:  # a pass may lead to another call
            return
        self._passing = True
        try:
            now = self._clock.now()
            self.waiting.reorder()
            for clip in self.waiting:
                why = self._admission.hopeless(clip, now)
                if why is not None:
                    ending = refused(why) if clip.loss is None else failed(why)
                    self.ledger.settle(clip, ending)
            # A clip that is unlikely to be in time gets instances that no other clip can use.
            for in_time in (True, False):
                for clip in self.waiting:
                    free = [instance for instance in self.fleet.ready() if instance.free]
                    if not free:
                        return
                    self._start_on(free, clip, now, in_time=in_time)
        except Exception:
            service_log.exception("a pass over waiting slots failed; will retry")
        finally:
            self._passing = False

    def _start_on(
        self, free: list[ClipInstance], clip: ClipTask, now: float, *, in_time: bool
    ) -> None:
        """Send ``clip`` to the instance that finishes it first, if it is ``in_time`` there. Without
        ``in_time``, send it to an instance worth a try."""
        better = [instance for instance in free if instance.address not in clip.failed_on] or free
        if not in_time:
            better = self._admission.tries(clip, better, now)
        found = place(clip.needs, {one.address: one.line(now) for one in better})
        if found is not None and (found.is_in_time or not in_time):
            self._send(clip, self.fleet.instances[found.address], found, now)

    def _send(self, clip: ClipTask, instance: ClipInstance, found: Expected, now: float) -> None:
        self.waiting.remove(clip)
        clip.dispatched(instance.address, now)
        begun = Begun(found.plan, clip.percents)
        keep_on = self.refusals.runs_on(clip)
        attempt = ClipAttempt(clip, instance.address, begun, self._clock, keep_on=keep_on)
        clip.attempt = attempt
        instance.attempts.append(attempt)
        self.fleet.count(instance.address)
        name = f"slot {clip.id} on {instance.address}"
        attempt.runner = asyncio.create_task(self._attempt(attempt), name=name)
        attempt.runner.add_done_callback(lambda _: self._left(instance, attempt))

    def _left(self, instance: ClipInstance, attempt: ClipAttempt) -> None:
        """Forget an attempt that has left its instance."""
        if attempt in instance.attempts:
            instance.attempts.remove(attempt)
        self.fleet.count(instance.address)
        self._pass()

    def _again(self, attempt: ClipAttempt, error: TidegateError | None, now: float) -> None:
        """Send the clip to another instance if its deadline and attempts allow, or end it."""
        clip = attempt.clip
        if clip.ending is not None:
            return
        clip.attempts += 1
        clip.failed_on |= {attempt.address}
        clip.loss = error or InstanceLost("the instance could not continue this")
        if clip.attempts >= ATTEMPTS or clip.deadline.left_ms(now) <= 0:
            self.ledger.settle(clip, failed(clip.loss))
            return
        clip.requeued()
        self.ledger.retries.inc()
        narrate(service_log, RETRIED, clip.model, **clip.names(), instance=attempt.address)
        self.waiting.add(clip)
        self._pass()

    # ── ends ─────────────────────────────────────────────────────────────────────────────────

    def _count_stop(self, clip: ClipTask, code: Code | None, now: float) -> None:
        """Count the end of a clip on an instance among refusals, if it was a stop."""
        spared = bool(clip.facts.get("spared"))
        self.refusals.stopped(clip, code, clip.deadline.left_ms(now), spared=spared)

    def _ended(self, clip: ClipTask) -> None:
        self._live.discard(clip)
        self.waiting.remove(clip)
        self.on_end()

    def _expected_there(self, attempt: ClipAttempt, now: float) -> Expected:
        """Forecast for a clip on an instance, which renders clips in the order of arrival."""
        instance = self.fleet.instances.get(attempt.address)
        before = [] if instance is None else instance.attempts
        at = before.index(attempt) if attempt in before else len(before)
        ability = NOMINAL_ABILITY if instance is None else instance.ability
        line = InstanceTimeline(ability, now, [other.begun for other in before[:at]])
        finish_at = line.finish(attempt.begun.left(ability))
        done_at = finish_at + ability.buffer_s
        return Expected(attempt.address, attempt.begun.plan, finish_at, done_at, True)


_ROWS: tuple[MetricRow[Clips], ...] = (
    MetricRow(
        "gauge",
        "slots_waiting",
        "slots",
        "Clips that wait for an instance",
        lambda clips: len(clips.waiting),
    ),
    MetricRow(
        "gauge",
        "slots_running",
        "slots",
        "Clips that an instance has",
        lambda clips: len(clips.live) - len(clips.waiting),
    ),
)
