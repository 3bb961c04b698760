"""From the queue onto a lane, and back: a queued task becomes a flight, a flight ends a task."""

import asyncio
from collections.abc import Callable

from orchestrator.clock import Clock
from orchestrator.errors import TidegateError
from orchestrator.forecast import Forecaster
from orchestrator.lanes import Lane
from orchestrator.log import fields, service_log
from orchestrator.metrics import Metrics
from orchestrator.placement import Choice, Placer, Spec
from orchestrator.prediction import Load, PaceModel
from orchestrator.queue import TaskQueue
from orchestrator.registry import Registry
from orchestrator.settle import Settler, failed, judge, overdue, refused
from orchestrator.task import Ending, Job, Stage, Task
from orchestrator.window import Flown, Window
from worker.protocol import AbortCause, Delta, End, OnDeadline

POLICY_PASSES = 32
"""Waiting tasks that an operator's policy may send nowhere before a pump goes no further."""


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
        forecaster: Forecaster,
        placer: Placer,
        infeasible: Callable[[Task], TidegateError],
        lets_run_s: float | None = None,
    ) -> None:
        """``infeasible`` says why a waiting task cannot make its deadline any more.

        With ``lets_run_s`` work that has started has this long, whatever its deadline.
        """
        self._registry = registry
        self._queue = queue
        self._settler = settler
        self._metrics = metrics
        self._clock = clock
        self._grace_s = grace_ms / 1000
        self._forecaster = forecaster
        self._placer = placer
        self._infeasible = infeasible
        self._lets_run_s = lets_run_s
        self.landed = asyncio.Event()
        """Set whenever a job is over on its worker; whoever waits clears it."""

    def enqueue(self, task: Task) -> None:
        """Take an admitted task: it starts now, later, or ends at its deadline."""
        task.stage = Stage.QUEUED
        task.marks.queued = self._clock.now()
        task.timer = self._clock.call_at(task.deadline.at, lambda: self._deadline_passed(task))
        self._queue.push(task)
        self.pump()

    def withdraw(self, task: Task) -> None:
        """Forget a task that ended while it waited."""
        if self._queue.remove(task):
            self.pump()

    def pump(self) -> None:
        """Start every waiting task that has somewhere to go."""
        if not self._queue:
            return
        now = self._clock.now()
        for task in self._queue.expired(now):
            in_vain = task.deadline.left_ms(now) > 0
            self._settler.settle(
                task, refused(self._infeasible(task)) if in_vain else overdue(task, now)
            )
        placer = self._placer
        placer.refresh()
        blocked: set[Spec] = set()
        passes = POLICY_PASSES
        has_room = placer.has_room
        for task in self._queue:
            if not has_room or not passes:
                return
            spec = placer.spec(task)
            if spec in blocked:
                continue
            choice = placer.choose(task)
            if choice is not None:
                self._queue.take(task)
                self._dispatch(task, choice)
                placer.sent(task, choice)
                has_room = placer.has_room
            elif placer.has_room_for(spec):  # the policy's word, and of this task only
                passes -= 1
            else:
                blocked.add(spec)

    def _dispatch(self, task: Task, choice: Choice) -> None:
        now = self._clock.now()
        address = choice.name
        instance = self._registry.instances[address]
        lane = instance.best_lane()
        self._forecaster.fit(task, task.deadline.left_ms(now))
        task.stage = Stage.DISPATCHED
        task.instance = address
        task.marks.dispatched = now
        flight = LaneFlight(self, task, lane, instance.window, choice)
        if instance.pace is not None:
            flight.basis = (instance.pace.model, instance.load_ahead)
        flight.job.output_tokens = self._forecaster.usual_tokens(task)
        instance.window.sent(flight.job, instance.load)
        task.flight = flight
        flight.handle = lane.submit(
            flight,
            token_ids=list(task.token_ids),
            sampling=task.sampling,
            budget_ms=task.deadline.left_ms(now)
            if self._lets_run_s is None
            else 1000 * self._lets_run_s,
            deadline_unix_ms=task.deadline.unix_ms,
            # What fit leaves too long after all ends cleanly.
            on_deadline=OnDeadline.PARTIAL
            if task.job.on_deadline is OnDeadline.FIT
            else task.job.on_deadline,
            correlation_id=task.correlation_id,
            cache_salt=task.cache_salt,
            session=_session(task.job),
        )

    def _deadline_passed(self, task: Task) -> None:
        """A task's timer. A worker that has it gets a moment to say so itself."""
        if task.flight is not None and self._lets_run_s is not None:
            return
        now = self._clock.now()
        ends_at = task.deadline.at + (self._grace_s if task.flight is not None else 0.0)
        if now < ends_at:
            task.timer = self._clock.call_at(ends_at, lambda: self._deadline_passed(task))
            return
        self._queue.remove(task)
        self._settler.settle(task, overdue(task, now))

    # ── what flights tell ────────────────────────────────────────────────────────────────────

    def flight_ended(self, flight: "LaneFlight", end: End) -> None:
        """The worker is done with a job: its slot is free."""
        now = self._clock.now()
        self._metrics.count_late(flight.late_tokens + end.late_tokens)
        if flight.cause is not None:
            freed_ms = 1000 * (now - flight.abandoned_at)
            if flight.cause is AbortCause.DISCONNECT:
                self._metrics.disconnect_ms.observe(freed_ms)
            self._metrics.cancellation_ms.observe(freed_ms)
            if end.abort_ms is not None:
                self._metrics.abort_freed_ms.labels(flight.cause.value).observe(end.abort_ms)
        flight.task.flight = None
        flight.window.over(flight.job)
        self.landed.set()
        instance = self._registry.instances.get(flight.task.instance)
        pace = None if instance is None else instance.pace
        self._forecaster.ended(flight.task, end, pace, flight.basis)
        self._settler.settle(flight.task, judge(flight.task, end, now), end)
        self.pump()

    def flight_lost(self, flight: "LaneFlight", error: TidegateError) -> None:
        """The lane is gone, and what the job did with it."""
        self._metrics.count_late(flight.late_tokens)
        flight.task.flight = None
        flight.window.over(flight.job)
        self.landed.set()
        self._settler.settle(flight.task, failed(error))
        self.pump()

    def listener_failed(self, flight: "LaneFlight") -> None:
        """A fault of ours in handling one task's tokens must not cost the lane's other tasks."""
        service_log.exception(
            "what a worker told of a task could not be handled",
            extra=fields(task_id=flight.task.id, correlation_id=flight.task.correlation_id),
        )
        self._settler.settle(flight.task, failed(TidegateError("an internal error occurred")))

    def now(self) -> float:
        return self._clock.now()


class LaneFlight:
    """One task's job on a lane. When the task ends first, it stays until the worker is done."""

    __slots__ = (
        "_dispatcher",
        "_lane",
        "abandoned_at",
        "basis",
        "cause",
        "handle",
        "job",
        "late_tokens",
        "task",
        "window",
    )

    def __init__(
        self, dispatcher: Dispatcher, task: Task, lane: Lane, window: Window, choice: Choice
    ) -> None:
        self._dispatcher = dispatcher
        self._lane = lane
        self.task = task
        self.window = window
        blocks = 0
        if task.block_tokens:
            new = task.prompt_tokens - choice.cached_tokens + task.sampling.max_tokens
            blocks = -(-new // task.block_tokens)
        self.job = Flown(
            new_tokens=task.prompt_tokens - choice.cached_tokens,
            output_tokens=1,
            blocks=blocks,
            is_computing_prompt=lambda: not task.marks.first_token,
        )
        self.handle = -1
        self.basis: tuple[PaceModel, Load] | None = None
        """What was known of the instance when the job was sent there."""
        self.late_tokens = 0
        self.abandoned_at = 0.0
        self.cause: AbortCause | None = None

    # what the lane tells

    def started(self, wait_ms: float) -> None:
        try:
            self.window.started(self.job, wait_ms)
            self.task.begin(self._dispatcher.now(), wait_ms)
        except Exception:
            self._dispatcher.listener_failed(self)

    def tokens(self, delta: Delta, now: float) -> None:
        if self.task.ending is not None:
            self.late_tokens += len(delta.ids)
            return
        try:
            self.task.deliver(delta, now)
        except Exception:
            self._dispatcher.listener_failed(self)

    def ended(self, end: End) -> None:
        try:
            self._dispatcher.flight_ended(self, end)
        except Exception:
            self._dispatcher.listener_failed(self)

    def lost(self, error: TidegateError) -> None:
        try:
            self._dispatcher.flight_lost(self, error)
        except Exception:
            self._dispatcher.listener_failed(self)

    # what the task tells

    def abandon(self, ending: Ending) -> None:
        self.cause = ending.cause
        self.abandoned_at = self._dispatcher.now()
        self._lane.cancel(self.handle, ending.cause or AbortCause.CANCEL)


def _session(job: Job) -> str:
    """As workers know a conversation: tenants may use the same names."""
    return f"{job.tenant}/{job.session_id}" if job.session_id else ""
