"""Moves tasks from the queue to lanes: starts all tasks that can start after each change."""

import math
from collections.abc import Callable

from orchestrator.clock import Clock
from orchestrator.dispatch.attempt import Attempt
from orchestrator.dispatch.completion import Completion
from orchestrator.dispatch.launch import Launcher
from orchestrator.dispatch.replan import Replanner
from orchestrator.dispatch.retry import BACKOFF_S, RetryAfter
from orchestrator.errors import QueueFull, TidegateError
from orchestrator.placement.placer import Placer
from orchestrator.prediction.feasibility import RefusalKind
from orchestrator.prediction.prediction import Prediction
from orchestrator.queue.order import QueuePolicy
from orchestrator.queue.task_queue import AT_ONCE, TaskQueue
from orchestrator.tasks.task import Task
from orchestrator.tasks.verdicts import failed, no_first_token, overdue, refused
from orchestrator.tasks.work import Stage
from orchestrator.telemetry.log import fields, service_log
from orchestrator.telemetry.narration import RETRIED, narrate
from protocol import End, OnDeadline


class Dispatcher:
    """Moves tasks into the queue within its bound, out to workers, and back for a retry."""

    def __init__(
        self,
        queue: TaskQueue[Task],
        placer: Placer,
        prediction: Prediction,
        launcher: Launcher,
        completion: Completion,
        clock: Clock,
    ) -> None:
        self._queue = queue
        self._placer = placer
        self._pausing = launcher.pausing
        self._prediction = prediction
        self._launcher = launcher
        self._completion = completion
        self._clock = clock
        self._limits = launcher.limits
        self._in_flight = launcher.in_flight
        self._replanner = Replanner(queue, prediction.forecaster, clock, self._planned)
        self.attempts_done = launcher.in_flight.removed
        """Set whenever a job ends on its worker; the waiter clears it."""
        self.on_queued: Callable[[], None] = lambda: None
        """Called for each task that may have to wait; must not raise."""

    # ── in and out of the queue ──────────────────────────────────────────────────────────────

    def require_room(self, task: Task) -> None:
        """Make room in the queue for ``task``, unless it can start at once (OR-4).

        Call it right before ``enqueue``. Raises ``QueueFull``.
        """
        queue, feasibility = self._queue, self._prediction.feasibility
        is_at_share = queue.is_at_share(task)
        if not (queue.full or is_at_share) or self._placer.could_start(task):
            return
        if is_at_share:
            raise QueueFull(
                "tasks of this tenant hold as many places in the queue as one tenant may: durable "
                "tasks keep their places; try again when some of them have started",
                retry_after_ms=self._prediction.schedule.room_ms(task.model),
            )
        expiry = queue.next_expiry
        if expiry is not None and expiry <= self._clock.now():
            self.pump()
        if not queue.full:
            return
        leaves = queue.oldest_batch(task) if queue.policy is QueuePolicy.DROP_LRU else None
        leaves = leaves or queue.giving_way(task)
        if leaves is not None:
            self._displace(leaves)
        elif not feasibility.samples(task, RefusalKind.QUEUE_FULL):
            raise QueueFull(
                f"{len(queue)} tasks already wait, the queue's bound",
                retry_after_ms=self._prediction.schedule.room_ms(task.model),
            )

    def _displace(self, task: Task) -> None:
        """End a waiting task whose place other work takes, except in the refusal sample."""
        if self._prediction.feasibility.samples(task, RefusalKind.DROPPED):
            self._queue.reorder([task])
            return
        message = "the queue is full, and other work took this task's place"
        retry_after_ms = self._prediction.schedule.room_ms(task.model)
        self._completion.settle(task, refused(QueueFull(message, retry_after_ms=retry_after_ms)))
        self.withdraw(task)

    def enqueue(self, task: Task) -> None:
        """Accept an admitted task: it starts now or later, or ends at its deadline."""
        self._launcher.retrier.budget.offered()
        task.stage = Stage.QUEUED
        now = task.marks.queued = self._clock.now()
        ends_at = self._limits.ends_at(task, now)
        task.timer = self._clock.call_at(ends_at, lambda: self._deadline_passed(task))
        if self._limits.loop_delay is not None and task.job.on_deadline is not OnDeadline.ERROR:
            self._limits.loop_delay.watch(task.deadline.at)
        self._queue.push(task)
        self._replanner.wake()
        self.on_queued()
        self.pump()

    def instances_changed(self) -> None:
        """Start tasks: an instance may be new, or may accept work again."""
        self.pump()

    def withdraw(self, task: Task) -> None:
        if self._queue.remove(task):
            self.pump()

    def mark_reading(self, task: Task, does: bool) -> None:
        """Record whether a task's client reads (``does``) or has fallen behind."""
        if task.is_unread is not does or task.ending is not None:
            return
        task.is_unread = not does
        self._replanner.plan([task])  # a paused one continues
        self.pump()

    def _deadline_passed(self, task: Task) -> None:
        """Handle a task's timer. A worker with the task gets a grace period to report its end."""
        now = self._clock.now()
        ends_at = self._limits.ends_at(task, now)
        if ends_at == math.inf:
            return
        if now < ends_at:
            task.timer = self._clock.call_at(ends_at, lambda: self._deadline_passed(task))
            return
        lacks_token = self._limits.lacks_first_token(task, now)
        self._queue.remove(task)
        self._completion.settle(task, (no_first_token if lacks_token else overdue)(task, now))

    # ── a pass: start all tasks that can ─────────────────────────────────────────────────────

    def pump(self) -> None:
        """Start every waiting task that an instance can take.

        Lanes call this among others: an error here must not break them.
        """
        if not (self._queue or self._pausing.is_wanted_inside or self._pausing.has_surplus):
            return
        try:
            now = self._clock.now()
            for task in self._queue.expired(now):
                self._completion.settle(task, overdue(task, now))
            self._placer.refresh()
            if self._placer.has_room:
                self._start()
            room = self._pausing.make_room(self._queue, self._in_flight, now)
            if room.left:
                try:  # waiting tasks start before those that made room
                    for task in room.recalled:
                        self._recall(task)
                    self._placer.refresh()
                    self._start()
                finally:
                    self._queue_left(room.left, now)
                self._placer.refresh()
                self._start()
            if self._pausing.is_wanted_inside:
                self._replanner.wake()
        except Exception:
            service_log.exception("dispatch pass failed; will retry")

    def _planned(self) -> None:
        """Refuse waiting tasks without a chance, then start tasks that can start."""
        feasibility = self._prediction.feasibility
        try:
            for model in {task.model for task in self._queue.tasks()}:
                for task in feasibility.hopeless(model):
                    if feasibility.gives_up(task):
                        self._queue.remove(task)
                        self._completion.settle(task, refused(feasibility.infeasible(task)))
        except Exception:  # waiting tasks must start anyway
            service_log.exception("looking for tasks without a chance failed; will retry")
        self.pump()

    def _start(self) -> None:
        """Send every task that an instance can take, as of the placer's last ``refresh``."""
        placer = self._placer
        # Iteration in order is expensive with many tenants, one pass over all tasks is cheap: it
        # shows which requirements wait, so that iteration stops when none of them has room.
        left = {placer.requirements(task) for task in self._queue.tasks()}
        passes = AT_ONCE  # tasks that a policy may exclude
        has_room = placer.has_room
        # Without a free slot only interactive work may start, on instances that pause other jobs.
        for task in self._queue.leaving(only_interactive=not placer.has_free_slot):
            if not has_room or not passes:
                return
            if task.is_unread and task.paused_on:  # its client would not read the tokens
                continue
            requirements = placer.requirements(task)
            if requirements not in left:
                continue
            try:
                choice = placer.choose(task)
                if choice is None:
                    if task.is_background and not placer.has_free_slot:
                        return  # all remaining tasks are background
                    if placer.has_room_for(requirements):  # this task only: a policy
                        passes -= 1
                    else:
                        left.discard(requirements)
                        if not left:
                            return
                    continue
                self._queue.take(task)
                self._launcher.start(self, task, choice)
                placer.placed(task, choice)
            except Exception:
                self._fail(task, "dispatch of a task failed")  # the next ones go on
            has_room = placer.has_room

    def _recall(self, task: Task) -> None:
        """Take back a task from a worker that has made no token for it."""
        assert isinstance(task.attempt, Attempt)
        task.attempt.withdraw()
        task.stage = Stage.QUEUED
        task.time_spent.waits(self._clock.now())
        task.instance = ""
        self._queue_again(task)

    def _queue_left(self, tasks: list[Task], now: float) -> None:
        """Queue tasks that have made room; take those back that are not paused."""
        for task in tasks:
            if task.ending is not None:
                continue
            if not task.paused_on:
                self._recall(task)
                continue
            self._prediction.forecaster.plan(task, now)
            self._queue.push(task)
        self._replanner.wake()

    # ── attempts (AttemptOwner) ──────────────────────────────────────────────────────────────

    def attempt_ended(self, attempt: Attempt, end: End) -> None:
        is_current = self._detach(attempt)
        self._retry(attempt, self._completion.ended(attempt, end, is_current=is_current))
        self.pump()

    def attempt_lost(self, attempt: Attempt, error: TidegateError) -> None:
        is_current = self._detach(attempt)
        self._retry(attempt, self._completion.lost(attempt, error, is_current=is_current))
        self.pump()

    def listener_failed(self, attempt: Attempt) -> None:
        """Fail the attempt's task: an internal error must not affect the lane's other tasks."""
        self._fail(attempt.task, "handling a worker's message failed")

    def _detach(self, attempt: Attempt) -> bool:
        """Remove an ended job; returns whether its task still used it."""
        self._in_flight.remove(attempt)
        attempt.concurrency.remove(attempt.job)
        task = attempt.task
        is_current = task.attempt is attempt
        if is_current:
            task.attempt = None
            self._forget_pause(task)
        return is_current

    def _forget_pause(self, task: Task) -> None:
        """Remove a paused task from the queue: the job that it would have resumed is gone."""
        if task.paused_on:
            task.paused_on = ""
            self._queue.remove(task)

    def _fail(self, task: Task, what: str) -> None:
        """End a task after an internal error; call it while handling the exception."""
        ids = fields(task_id=task.id, correlation_id=task.correlation_id)
        service_log.exception(what, extra=ids)
        self._queue.remove(task)
        self._completion.settle(task, failed(TidegateError("an internal error occurred")))

    # ── second tries (OR-10) ─────────────────────────────────────────────────────────────────

    def upkeep(self) -> None:
        """Move jobs of silent and draining instances to others.

        Call it about every 250 ms.
        """
        try:
            # One by one: a withdrawn task is back in the queue before the next one is judged.
            for attempt, retry in self._completion.leave(self._in_flight):
                self._forget_pause(attempt.task)
                self._retry(attempt, retry)
        finally:
            self.pump()

    def _retry(self, attempt: Attempt, retry: RetryAfter | None) -> None:
        if retry is None:
            return
        task = attempt.task
        task.attempts += retry.is_try
        task.failed_on |= {attempt.address}
        task.stage = Stage.QUEUED
        task.time_spent.waits(self._clock.now())
        task.instance = ""
        narrate(
            service_log,
            RETRIED,
            attempt.address,
            task_id=task.id,
            correlation_id=task.correlation_id,
            instance=attempt.address,
            attempt=task.attempts,
            after_tokens=task.completion_tokens,
        )
        self._try_again(task, retry.delay_s)

    def _try_again(self, task: Task, delay_s: float) -> None:
        """Queue a task again after ``delay_s``, and when the fate of its workers is known."""
        if task.ending is not None:
            return
        if not delay_s and self._completion.awaits_fate(task):
            delay_s = BACKOFF_S
        if not delay_s:
            self._queue_again(task)
            return

        def later() -> None:
            self._try_again(task, 0.0)
            self.pump()

        self._clock.call_at(self._clock.now() + delay_s, later)

    def _queue_again(self, task: Task) -> None:
        if task.ending is not None:
            return
        # A forecast of the whole task must not lose the tokens that it has already generated.
        task.refusal_sample |= task.completion_tokens > 0
        self._prediction.forecaster.plan(task, self._clock.now())
        self._queue.push(task)
        self._replanner.wake()
