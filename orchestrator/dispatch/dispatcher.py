"""From the queue onto a lane, and back: a queued task becomes a flight, a flight ends a task."""

import asyncio
import math
from collections.abc import Callable
from itertools import islice

from orchestrator.admission.outlook import Outlook
from orchestrator.clock import Clock
from orchestrator.dispatch.attempt import Attempt
from orchestrator.dispatch.hedge import Hedger
from orchestrator.dispatch.pausing import Pausing
from orchestrator.dispatch.replan import Replanner
from orchestrator.dispatch.retry import RETRYABLE, Again, Retrier, rest_of
from orchestrator.errors import TidegateError
from orchestrator.instances.breaker import record_end
from orchestrator.instances.concurrency import InFlightJob
from orchestrator.instances.instance import Instance, InstanceState
from orchestrator.instances.registry import Registry
from orchestrator.placement import Choice, Placer, Spec
from orchestrator.prediction.forecaster import Forecaster
from orchestrator.prediction.refusals import Refusals
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.tasks.settle import (
    Settler,
    Verdict,
    failed,
    judge,
    no_first_token,
    overdue,
    refused,
)
from orchestrator.tasks.task import Job, Stage, Task
from orchestrator.telemetry.log import fields, service_log
from orchestrator.telemetry.metrics import Metrics
from worker.protocol import AbortCause, Code, End, OnDeadline, Outcome

HELD_S = 0.002
"""A task that was not sent within this had to wait for room."""
FRESH = 4
"""Waiting tasks whose turn is next are planned anew before anything is started."""
POLICY_PASSES = 32
"""Waiting tasks that an operator's policy may send nowhere before a pump goes no further."""
FEW_SPECS = 8
"""After so many that cannot start, a pump no longer asks whether that is all there are."""

LONG_WAY = 0.98
"""The quantile of ways that a clean end allows for."""
MOST_WAY = 0.25
"""And at most this share of the time that is left."""

FAULTS = frozenset({Code.ENGINE_ERROR, Code.INTERNAL})
"""An instance's own: a rival that is under way already is not touched by them."""


class Dispatcher:
    """Starts what can start whenever something changes, and ends what has run out of time."""

    def __init__(
        self,
        registry: Registry,
        queue: TaskQueue[Task],
        settler: Settler,
        metrics: Metrics,
        clock: Clock,
        *,
        grace_ms: float,
        return_margin_ms: float,
        forecaster: Forecaster,
        placer: Placer,
        refuses_late: Callable[[Task], bool],
        infeasible: Callable[[Task], TidegateError],
        retrier: Retrier,
        hedger: Hedger,
        pausing: Pausing,
        outlook: Outlook,
        refusals: Refusals,
        lets_run_s: float | None = None,
    ) -> None:
        """``refuses_late`` is asked of a waiting task that cannot make its deadline any more,
        ``infeasible`` then says why.

        With ``lets_run_s`` work that has started has this long, whatever its deadline.
        """
        self._registry = registry
        self._queue = queue
        self._settler = settler
        self._metrics = metrics
        self._clock = clock
        self._grace_s = grace_ms / 1000
        self._return_margin_s = return_margin_ms / 1000
        self._forecaster = forecaster
        self._placer = placer
        self._refuses_late = refuses_late
        self._infeasible = infeasible
        self._retrier = retrier
        self._hedger = hedger
        self._pausing = pausing
        self._outlook = outlook
        self._refusals = refusals
        outlook.attempts = lambda: self._attempts
        self._replanner = Replanner(queue, forecaster, clock, self.pump)
        self._lets_run_s = lets_run_s
        self._attempts: dict[Attempt, None] = {}
        """In the order in which they were sent, so that a run repeats itself."""
        self.attempts_done = asyncio.Event()
        """Set whenever a job is over on its worker; whoever waits clears it."""

        registry.listen(self)

    def instances_changed(self) -> None:
        self.pump()

    def enqueue(self, task: Task) -> None:
        """Take an admitted task: it starts now, later, or ends at its deadline."""
        self._retrier.budget.offered()
        self._hedger.budget.offered()
        task.stage = Stage.QUEUED
        task.marks.queued = self._clock.now()
        first_at = min(self._out_of_time_at(task), task.parts.cut_at)
        task.timer = self._clock.call_at(first_at, lambda: self._deadline_passed(task))
        self._queue.push(task)
        self._replanner.wake()
        self.pump()
        if task in self._queue:
            self._outlook.queued(task)

    def reads(self, task: Task, does: bool) -> None:
        """The client of a task is behind, or reads again."""
        if task.is_unread is not does or task.ending is not None:
            return
        task.is_unread = not does
        self._replanner.plan([task])  # a paused one goes on
        self.pump()

    def withdraw(self, task: Task) -> None:
        """Forget a task that ended while it waited."""
        if self._queue.remove(task):
            self.pump()

    def pump(self) -> None:
        """Start every waiting task that has somewhere to go.

        Lanes call this among others: whatever goes wrong here must not break them.
        """
        if not self._queue:
            return
        try:
            now = self._clock.now()
            self._sweep(now)
            self._placer.refresh()
            has_room = self._placer.has_room
            if has_room or self._pausing.is_due(now):
                self._replanner.plan(list(islice(self._queue, FRESH)))
            if has_room:
                self._start(now)
            if paused := self._make_room(now):
                try:  # those for whom there is room now, before those who made it
                    self._placer.refresh()
                    self._start(now)
                finally:
                    self._queue_paused(paused, now)
                self._placer.refresh()
                self._start(now)
            self._outlook.has_room()
        except Exception:
            service_log.exception("dispatch pass failed; will retry")

    def _sweep(self, now: float) -> None:
        """End what has run out of time, or of hope."""
        for task in self._queue.expired(now):
            if task.deadline.left_ms(now) <= 0:
                self._settler.settle(task, overdue(task, now))
            elif self._refuses_late(task):
                self._settler.settle(task, refused(self._infeasible(task)))
            else:
                self._queue.push(task)

    def _start(self, now: float) -> None:
        """Whoever has somewhere to go, as of the placer's last ``refresh``."""
        placer = self._placer
        blocked: set[Spec] = set()
        passes = POLICY_PASSES
        has_room = placer.has_room
        for task in self._queue:
            if not has_room or not passes:
                return
            if task.is_unread and task.paused_on:  # for whom?
                continue
            spec = placer.spec(task)
            if spec in blocked:
                continue
            try:
                choice = placer.choose(task)
                if choice is None:
                    if task.is_background and not placer.idles:
                        return  # all that are left are background
                    if placer.has_room_for(spec):  # a word about this task only, mostly a policy's
                        passes -= 1
                    else:
                        blocked.add(spec)
                        # In order is dear where many tenants wait; this goes through them once.
                        if len(blocked) <= FEW_SPECS and all(
                            placer.spec(other) in blocked for other in self._queue.tasks()
                        ):
                            return
                    continue
                self._queue.take(task)
                self._dispatch(task, choice)
                placer.sent(task, choice)
            except Exception:
                self._could_not_start(task)
            has_room = placer.has_room

    def _could_not_start(self, task: Task) -> None:
        """A fault of ours with one task: it goes, lest it keep all those behind it waiting."""
        service_log.exception(
            "a task could not be sent",
            extra=fields(task_id=task.id, correlation_id=task.correlation_id),
        )
        self._queue.remove(task)
        self._settler.settle(task, failed(TidegateError("an internal error occurred")))

    def _make_room(self, now: float) -> list[Task]:
        """Pause running jobs for more urgent ones that wait; those paused are to be queued."""
        paused = self._pausing.victims(self._queue, self._attempts, now)
        for attempt in paused:
            self._pause(attempt, now)
        return [attempt.task for attempt in paused]

    def _pause(self, attempt: Attempt, now: float) -> None:
        task = attempt.task
        attempt.pause()
        self._pausing.stats.paused += 1
        task.pauses += 1
        task.paused_on = attempt.address
        task.paused_at = now

    def _queue_paused(self, tasks: list[Task], now: float) -> None:
        for task in tasks:
            if task.ending is None:
                self._forecaster.plan(task, now)
                self._queue.push(task)
                self._replanner.wake()
        self._replanner.wake()

    def _resume(self, task: Task, now: float) -> None:
        """A paused job has a slot again."""
        attempt = task.attempt
        assert isinstance(attempt, Attempt) and attempt.is_paused
        task.paused_on = ""
        task.prompt_ready_at += now - task.paused_at
        self._pausing.stats.resumed += 1
        attempt.resume(self._registry.instances[attempt.address].load)

    def _dispatch(self, task: Task, choice: Choice) -> None:
        now = self._clock.now()
        if task.paused_on:
            self._resume(task, now)
            return
        task.stage = Stage.DISPATCHED
        task.instance = choice.name
        if not task.completion_tokens:
            instance = self._registry.instances[choice.name]
            self._forecaster.fit(task, self._budget_ms(task, instance, now))
            task.trail = self._retrier.trail_for(task)
            task.marks.dispatched = now
            if task.given_chance is None:
                task.given_chance = self._forecaster.urgency(task, now).chance
            self._outlook.began(task)
        task.attempt = self._launch(task, choice, now)

    def _launch(self, task: Task, choice: Choice, now: float) -> Attempt:
        parts = task.parts
        first_due_s = parts.due_at(task.completion_tokens + 1, task.marks.first_token) - now
        instance = self._registry.instances[choice.name]
        lane, load = instance.best_lane(), instance.load
        attempt = Attempt(
            self, task, lane, instance.concurrency, self._in_flight_job(task, choice), now
        )
        token_ids, sampling = rest_of(task)
        if instance.pace is not None:
            model = instance.pace.model
            attempt.basis = (model, instance.occupancy)
            prompts = (
                attempt.job.new_tokens + instance.concurrency.outstanding_work(load).prefill_tokens
            )
            task.prompt_ready_at = now + prompts * model.prompt_token_ms * model.mid / 1000
        attempt.handle = lane.submit(
            attempt,
            token_ids=token_ids,
            sampling=sampling,
            budget_ms=self._budget_ms(task, instance, now),
            deadline_unix_ms=task.deadline.unix_ms,
            # What fit leaves too long after all ends cleanly.
            on_deadline=OnDeadline.PARTIAL
            if task.job.on_deadline is OnDeadline.FIT
            else task.job.on_deadline,
            correlation_id=task.correlation_id,
            cache_salt=task.cache_salt,
            session=_session(task.job),
            # What is late already is no longer urgent.
            first_token_budget_ms=1000 * first_due_s if 0 < first_due_s < math.inf else None,
            token_gap_ms=1000 * parts.token_gap_s if parts.token_gap_s < math.inf else None,
            keeps_on=self._refusals.spares(task),
        )
        # Only what was really sent counts as in flight.
        attempt.breaker_token = self._registry.breakers.begin(choice.name)
        instance.concurrency.add(attempt.job, load)
        self._attempts[attempt] = None
        return attempt

    def _in_flight_job(self, task: Task, choice: Choice) -> InFlightJob:
        """What a task is to the concurrency limit of the instance that takes it."""
        made = task.completion_tokens
        new = task.prompt_tokens - choice.cached_tokens + made
        most = new + task.sampling.max_tokens - made
        return InFlightJob(
            new_tokens=new,
            output_tokens=max(1, self._forecaster.usual_tokens(task) - made),
            blocks=-(-most // task.block_tokens) if task.block_tokens else 0,
            is_computing_prompt=lambda: not task.marks.first_token,
            was_queued=self._clock.now() - task.marks.queued > HELD_S,
        )

    def _deadline_passed(self, task: Task) -> None:
        """A task's timer. A worker that has it gets a moment to say so itself."""
        if task.attempt is not None and self._lets_run_s is not None:
            return
        now = self._clock.now()
        ends_at = self._out_of_time_at(task)
        lacks_token = task.parts.cut_at < ends_at and not task.completion_tokens
        if lacks_token:
            ends_at = task.parts.cut_at  # workers do not look at it: none is given a moment
        elif task.attempt is not None and task.deadline.at <= now and not _keeps_text(task):
            ends_at += self._grace_s
        if now < ends_at:
            task.timer = self._clock.call_at(ends_at, lambda: self._deadline_passed(task))
            return
        self._queue.remove(task)
        self._settler.settle(task, (no_first_token if lacks_token else overdue)(task, now))

    def _out_of_time_at(self, task: Task) -> float:
        """When ``task`` has to end here: early enough for a text that is to reach its client."""
        at = task.deadline.at
        if task.job.on_deadline is OnDeadline.ERROR:
            return at
        early = at - self._return_margin_s
        return early if task.completion_tokens or self._clock.now() < early else at

    def _budget_ms(self, task: Task, instance: Instance, now: float) -> float:
        """What a worker may take. Of a text that it is to end cleanly, the way is ours to keep."""
        if self._lets_run_s is not None:
            return 1000 * self._lets_run_s
        left_ms = task.deadline.left_ms(now)
        if task.job.on_deadline is OnDeadline.ERROR:
            return left_ms
        way_ms = instance.way_ms.at(LONG_WAY) + 1000 * self._return_margin_s
        return left_ms - min(way_ms, MOST_WAY * left_ms)

    # ── what flights tell ────────────────────────────────────────────────────────────────────

    def attempt_ended(self, attempt: Attempt, end: End) -> None:
        """The worker is done with a job: its slot is free."""
        now = self._clock.now()
        self._metrics.count_late(attempt.late_tokens + end.late_tokens)
        if attempt.cause is not None:
            freed_ms = 1000 * (now - attempt.abandoned_at)
            if attempt.cause is AbortCause.DISCONNECT:
                self._metrics.disconnect_ms.observe(freed_ms)
            self._metrics.cancellation_ms.observe(freed_ms)
            if end.abort_ms is not None:
                self._metrics.abort_freed_ms.labels(attempt.cause.value).observe(end.abort_ms)
        task, is_current = attempt.task, self._detach(attempt)
        instance = self._registry.instances.get(attempt.address)
        record_end(self._registry.breakers, instance, attempt, end, now)
        is_abandoned = attempt.abandoned_at > 0 and not attempt.lost_hedge
        if (is_current or is_abandoned) and not attempt.continues:
            pace = None if instance is None else instance.pace
            self._forecaster.ended(task, end, pace, attempt.basis)
        self._hedger.stats.aborts_verified += attempt.lost_hedge
        if instance is not None and end.code is None and not task.pauses:
            worker_ms = end.wait_ms + end.prefill_ms + end.decode_ms
            instance.way_ms.add(max(0.0, 1000 * (now - attempt.dispatched_at) - worker_ms))
        has_chance = end.code in RETRYABLE or (end.code in FAULTS and task.hedge is not None)
        if is_current and not (has_chance and self._try_again(attempt)):
            self._refusals.stopped(task, end, now)
            self._settler.settle(task, judge(task, end, now), end)
        self.pump()

    def attempt_lost(self, attempt: Attempt, error: TidegateError) -> None:
        """The lane is gone, and what the job did with it."""
        self._metrics.count_late(attempt.late_tokens)
        task, is_current = attempt.task, self._detach(attempt)
        instance = self._registry.instances.get(attempt.address)
        record_end(self._registry.breakers, instance, attempt, None, self._clock.now())
        if is_current and not self._try_again(attempt):
            self._settler.settle(task, self._last_word(attempt) or failed(error))
        self.pump()

    def _detach(self, attempt: Attempt) -> bool:
        """A job is over; whether its task still counted on it."""
        self._attempts.pop(attempt, None)
        attempt.concurrency.remove(attempt.job)
        self.attempts_done.set()
        task = attempt.task
        is_current = task.attempt is attempt
        if is_current:
            task.attempt = None
            self._forget_pause(task)
        elif task.hedge is attempt:
            task.hedge = None
        return is_current

    def _forget_pause(self, task: Task) -> None:
        """The job that it was to go on with is no more."""
        if task.paused_on:
            task.paused_on = ""
            self._queue.remove(task)

    # ── second tries (OR-10) ─────────────────────────────────────────────────────────────────

    def look(self) -> None:
        """See to jobs that are late with their first tokens; to be called every 250 ms or so."""
        self._leave_silent()
        self._hedge()

    def _leave_silent(self) -> None:
        """Take back what waits for its first token on an instance that has fallen silent."""
        silent = {i.address for i in self._registry if i.state is InstanceState.SUSPECT}
        if not silent:
            return
        for attempt in [f for f in self._attempts if f.address in silent]:
            task = attempt.task
            if task.attempt is attempt and not task.completion_tokens:
                if task.hedge is not None:
                    attempt.withdraw()
                    self._promote_hedge(task)
                    continue
                again = self._retrier.again(
                    task, attempt.address, self._clock.now(), elsewhere=True
                )
                if again is not None:
                    attempt.withdraw()
                    self._forget_pause(task)
                    self._go_again(task, attempt.address, again)
        self.pump()

    def _try_again(self, attempt: Attempt) -> bool:
        task = attempt.task
        if self._last_word(attempt) is not None:
            return False
        if task.hedge is not None:
            self._promote_hedge(task)
            return True
        again = self._retrier.again(task, attempt.address, self._clock.now())
        if again is None:
            return False
        self._go_again(task, attempt.address, again)
        return True

    def _go_again(self, task: Task, failed_on: str, again: Again) -> None:
        task.attempts += 1
        task.failed_on |= {failed_on}
        task.stage = Stage.QUEUED
        task.instance = ""
        service_log.info(
            "sent again",
            extra=fields(
                task_id=task.id,
                correlation_id=task.correlation_id,
                instance=failed_on,
                attempt=task.attempts,
                after_tokens=task.completion_tokens,
            ),
        )
        if again.delay_s <= 0:
            self._queue_again(task)
            return
        now = self._clock.now()
        self._clock.call_at(now + again.delay_s, lambda: self._queue_again(task, pump=True))

    def _queue_again(self, task: Task, *, pump: bool = False) -> None:
        if task.ending is not None:
            return
        # What it has already made must not be lost to a forecast for the whole of it.
        task.refusal_sample |= task.completion_tokens > 0
        self._forecaster.plan(task, self._clock.now())
        self._queue.push(task)
        self._replanner.wake()
        if pump:
            self.pump()

    def _last_word(self, attempt: Attempt) -> Verdict | None:
        """The end of a text that is complete though its worker could not say so any more."""
        task, now = attempt.task, self._clock.now()
        reason = self._retrier.finish_of(task, attempt.address)
        if reason is None:
            return None
        in_time = task.deadline.left_ms(now) >= 0
        return Verdict(Outcome.MET, reason) if in_time else overdue(task, now)

    # ── races (OR-10) ────────────────────────────────────────────────────────────────────────

    def _hedge(self) -> None:
        """Give late jobs a rival, unless others wait for the slot."""
        if self._queue or self._hedger.budget.is_empty:
            return
        now = self._clock.now()
        for attempt in list(self._attempts):
            task = attempt.task
            if task.attempt is not attempt or task.hedge is not None or task.completion_tokens:
                continue
            if not self._hedger.is_due(task, attempt.basis, attempt.dispatched_at, now):
                continue
            target = self._hedger.target(task)
            if target is None:
                continue
            self._hedger.budget.spend()
            self._hedger.stats.begun += 1
            task.hedge = self._launch(task, Choice(target, 0, 0.0), now)

    def _promote_hedge(self, task: Task) -> None:
        """The first job is out of it without a token."""
        hedge, task.hedge = task.hedge, None
        assert isinstance(hedge, Attempt) and task.attempt is None
        task.attempt, task.instance = hedge, hedge.address

    def first_token(self, attempt: Attempt) -> None:
        """One of two jobs for a task has a token: the other one is stopped."""
        task, hedge = attempt.task, attempt.task.hedge
        loser = task.attempt if hedge is attempt else hedge
        assert isinstance(loser, Attempt)
        if hedge is attempt:
            self._hedger.stats.won += 1
            task.attempt, task.instance = attempt, attempt.address
        else:
            self._hedger.stats.lost += 1
        task.hedge = None
        loser.lost_hedge = True
        loser.withdraw()

    def listener_failed(self, attempt: Attempt) -> None:
        """A fault of ours in handling one task's tokens must not cost the lane's other tasks."""
        service_log.exception(
            "what a worker told of a task could not be handled",
            extra=fields(task_id=attempt.task.id, correlation_id=attempt.task.correlation_id),
        )
        self._queue.remove(attempt.task)
        self._settler.settle(attempt.task, failed(TidegateError("an internal error occurred")))

    def now(self) -> float:
        return self._clock.now()


def _keeps_text(task: Task) -> bool:
    """Whether what there is goes to the client at the deadline (DL-6)."""
    return task.job.on_deadline is not OnDeadline.ERROR and task.completion_tokens > 0


def _session(job: Job) -> str:
    """As workers know a conversation: tenants may use the same names."""
    return f"{job.tenant}/{job.session_id}" if job.session_id else ""
