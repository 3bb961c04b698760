"""Chooses the running jobs to pause for more urgent work (DL-15).

A paused job keeps its KV on the instance, so nothing is recomputed, and waits in the queue by its
urgency. An answer that has begun is paused only for clearly more urgent work, or if it has ample
time. A job whose client does not read is the least urgent of all, and continues when the client
reads. Where memory does not hold one more job, a job without a token is taken back instead: its
prompt is computed again later.

The task that gets the slot waits in the queue or already inside the worker. A worker starts the
task with the least slack first.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from orchestrator.dispatch.attempt import Attempt
from orchestrator.dispatch.replan import PAUSE_S, PLAN_EVERY_S
from orchestrator.instances.instance import Instance
from orchestrator.instances.registry import Registry
from orchestrator.placement.placer import Placer
from orchestrator.prediction.forecaster import Forecaster
from orchestrator.prediction.schedule import AMPLE
from orchestrator.queue.task_queue import AT_ONCE, TaskQueue
from orchestrator.tasks.job import Priority
from orchestrator.tasks.task import Task
from orchestrator.tasks.work import Stage

MAX_MEMORY = 0.5
"""Share (0 to 1) of an instance's KV memory above which paused jobs prevent more pauses."""
_MARGIN = math.log(1.6)
"""How much more urgent a waiting task must be than an answer that has begun, as a logarithm: with
less, jobs swap for nothing. In the simulator, at twice the capacity with 64 slots, a factor of 3
met 0.594 and 0.587 of two loads, 1.6 met 0.605 and 0.620, and 1.2 no more than that. A job without
a token yet has little to lose and needs no margin."""


class PausableJob(NamedTuple):
    """A running job that may be paused."""

    urgency: float
    attempt: Attempt

    @property
    def limit(self) -> float:
        """The urgency from which a waiting task may take its row."""
        return self.urgency + (_MARGIN if self.attempt.task.completion_tokens else 0.0)


class Trade(NamedTuple):
    """The waiting task that gets a slot, and the running attempt that leaves it."""

    waiting: Task
    running: Attempt


class Room(NamedTuple):
    """Tasks that left their slots, and tasks inside other workers that get the slots.

    The second kind must be taken back from those workers, and of the first kind those that are not
    paused (``paused_on``).
    """

    left: list[Task]
    recalled: list[Task]


class Pausing:
    """Decides which running jobs are paused; pauses and resumes them."""

    def __init__(
        self, registry: Registry, forecaster: Forecaster, placer: Placer, *, enabled: bool
    ) -> None:
        self._registry = registry
        self._forecaster = forecaster
        self._placer = placer
        self._enabled = enabled
        self._next_at = 0.0
        self._least_urgent = -math.inf
        """The urgency of the least urgent running job at the last scan."""

    @property
    def is_wanted_inside(self) -> bool:
        """Whether a task waits for a slot inside a worker that can pause others for it."""
        return self._enabled and any(
            instance.can_pause and instance.has_waiting
            for instance in self._registry.instances.values()
        )

    @property
    def has_surplus(self) -> bool:
        """Whether an instance that can pause runs more rows than its limit."""
        return self._enabled and any(
            instance.can_pause and instance.load > instance.concurrency.most_rows
            for instance in self._registry.instances.values()
        )

    def may_free_row(self, task: Task) -> bool:
        """Whether a job of some instance could make room for ``task``."""
        able = [(name, self._registry.instances[name]) for name in self._placer.able(task)]
        return self._enabled and any(
            each.can_pause and (self._has_memory(name, task) or each.concurrency.computes_prompts)
            for name, each in able
        )

    def may_get_row(self, task: Task, now: float) -> bool:
        """Whether a row at once is likely: an instance may run more rows, or ``task``, with its
        slack used up, would be urgent enough for a pause."""
        limits = [self._registry.instances[name].concurrency for name in self._placer.able(task)]
        if any(limit.slots < limit.fitting for limit in limits):
            return True
        found = self._forecaster.urgency(task, now)
        if not found.chance:
            return False
        return math.log(found.chance / found.work_ms) >= self._least_urgent + _MARGIN

    def make_room(self, queue: TaskQueue[Task], attempts: Iterable[Attempt], now: float) -> Room:
        """Pause running jobs for more urgent waiting tasks."""
        room = Room([], [])
        if now < self._next_at:
            return room
        if self.has_surplus:
            for attempt in self.surplus(attempts, now):
                self._pause(attempt, now, for_another=False)
                room.left.append(attempt.task)
        for waiting, attempt in self.victims(queue, attempts, now):
            room.left.append(attempt.task)
            if attempt.task.completion_tokens or self._fits(attempt.address, waiting):
                self._pause(attempt, now, for_another=True)
            else:
                attempt.pause(for_another=True)  # leaves its slot now, its memory when it has ended
            if waiting.stage is Stage.DISPATCHED and waiting.instance != attempt.address:
                room.recalled.append(waiting)
        return room

    def _pause(self, attempt: Attempt, now: float, *, for_another: bool) -> None:
        task = attempt.task
        attempt.pause(for_another=for_another)
        task.pauses += 1
        task.paused_on = attempt.address
        task.paused_at = now
        task.time_spent.waits(now)

    def surplus(self, attempts: Iterable[Attempt], now: float) -> list[Attempt]:
        """The least urgent jobs of each instance that runs more rows than its limit."""
        found: list[Attempt] = []
        for name, jobs in self._by_instance(attempts, now).items():
            instance = self._registry.instances[name]
            over = instance.load - instance.concurrency.most_rows
            if over > 0 and self._may_hold_more(instance):
                found += _beyond_shares(jobs, over)
        return found

    @staticmethod
    def _may_hold_more(instance: Instance) -> bool:
        """Whether the paused jobs of ``instance`` hold at most ``MAX_MEMORY`` of its KV memory."""
        stats = instance.stats
        if stats is None or not stats.kv_blocks_total:
            return True
        return instance.concurrency.paused_blocks <= MAX_MEMORY * stats.kv_blocks_total

    def resume(self, task: Task, now: float) -> None:
        attempt = task.attempt
        assert isinstance(attempt, Attempt) and attempt.is_paused
        task.paused_on = ""
        task.prompt_ready_at += now - task.paused_at
        task.time_spent.resumed(now)
        attempt.resume(self._registry.instances[attempt.address].load)

    def victims(
        self, queue: TaskQueue[Task], attempts: Iterable[Attempt], now: float
    ) -> list[Trade]:
        """Jobs to pause, at most one for each of the first waiting tasks."""
        self._least_urgent = -math.inf
        if not self._enabled or not (queue or self.is_wanted_inside):
            return []
        attempts = list(attempts)
        # A scan takes about 20 µs per job, and urgent work can wait for the next one.
        self._next_at = now + PAUSE_S * len(attempts) / AT_ONCE
        running = self._by_instance(attempts, now)
        rows = {
            name: Counter(job.attempt.task.tenant for job in jobs) for name, jobs in running.items()
        }
        self._least_urgent = min((jobs[-1].urgency for jobs in running.values()), default=-math.inf)
        last_at = max((attempt.task.deadline.at for attempt in attempts), default=now)
        chosen: list[Trade] = []
        # By urgency alone: the next tenant in turn may have no task worth a pause.
        for task in (*self._inside(attempts, now), *queue.first(AT_ONCE)):
            if not running:
                break
            if task.is_background:
                continue
            urgency = self._forecaster.urgency(task, now).log_urgency
            ample_at = now + AMPLE * (task.deadline.at - now)
            least_urgent = min(jobs[-1].urgency for jobs in running.values())
            if urgency == -math.inf or (urgency < least_urgent and last_at < ample_at):
                continue
            least = self._victim(task, urgency, ample_at, running, rows)
            if least is None:
                continue
            jobs = running[least.attempt.address]
            jobs.remove(least)
            chosen.append(Trade(task, least.attempt))
            if not jobs:
                del running[least.attempt.address]
        return chosen

    def _victim(
        self,
        task: Task,
        urgency: float,
        ample_at: float,
        running: Mapping[str, Sequence[PausableJob]],
        rows: Mapping[str, Counter[str]],
    ) -> PausableJob | None:
        """The least urgent job that may make room for ``task``, preferably on the instance that
        already has the task. A job whose deadline is not before ``ample_at`` has ample time."""
        found = [
            job
            for name in self._placer.able(task)
            if (job := _least_urgent(running.get(name, ()), task, rows.get(name, {}))) is not None
            and (job.limit <= urgency or job.attempt.task.deadline.at >= ample_at)
            and (self._fits(name, task) or not job.attempt.task.completion_tokens)
        ]
        here = [job for job in found if job.attempt.address == task.instance]
        return min(here or found, key=lambda job: job.urgency, default=None)

    def _inside(self, attempts: Iterable[Attempt], now: float) -> list[Task]:
        """Tasks that have waited long for a slot inside a worker, except those for which a slot is
        already being freed."""
        waiting = {
            name: list[Task]()
            for name, instance in self._registry.instances.items()
            if instance.can_pause and instance.has_waiting
        }
        for attempt in attempts:
            task = attempt.task
            if attempt.has_slot or attempt.is_paused or task.attempt is not attempt:
                continue
            # A resumed job gets a slot before all others. Most sent jobs get one within a round of
            # planning.
            if task.stage is not Stage.DISPATCHED or now < attempt.dispatched_at + PLAN_EVERY_S:
                continue
            if attempt.address in waiting:
                waiting[attempt.address].append(task)
        found: list[Task] = []
        for name, tasks in waiting.items():
            tasks.sort(key=lambda task: -self._forecaster.urgency(task, now).log_urgency)
            found += tasks[self._registry.instances[name].concurrency.clearing :]
        return found

    def _by_instance(self, attempts: Iterable[Attempt], now: float) -> dict[str, list[PausableJob]]:
        """Jobs that may be paused, by instance, least urgent last."""
        full = {
            name: list[PausableJob]()
            for name, instance in self._registry.instances.items()
            if instance.can_pause and not instance.has_free_slot
        }
        for attempt in attempts:
            task, jobs = attempt.task, full.get(attempt.address)
            if jobs is None:
                continue
            if task.attempt is not attempt or attempt.is_paused:
                continue
            if (task.is_promised or _keeps_pace(task)) and not task.is_unread:
                continue  # promised, or its next token is due soon
            if not attempt.has_slot:
                continue
            urgency = (
                -math.inf
                if task.is_unread
                else self._forecaster.urgency_of_running(task, now).log_urgency
            )
            jobs.append(PausableJob(urgency, attempt))
        for jobs in full.values():
            jobs.sort(key=lambda job: -job.urgency)
        return {name: jobs for name, jobs in full.items() if jobs}

    def _fits(self, name: str, task: Task) -> bool:
        """Whether ``task`` can run on the instance next to all of its jobs, paused or not."""
        return task.paused_on == name or self._has_memory(name, task)

    def _has_memory(self, name: str, task: Task) -> bool:
        """Whether the instance's KV memory has room for ``task`` and all of its jobs."""
        instance = self._registry.instances[name]
        stats = instance.stats
        if stats is None or not stats.kv_blocks_total or not task.block_tokens:
            return True
        is_counted = task.stage is Stage.DISPATCHED and task.instance == name
        tokens = 0 if is_counted else task.prompt_tokens + task.sampling.max_tokens
        blocks = instance.concurrency.blocks - (-tokens // task.block_tokens)
        return self._may_hold_more(instance) and blocks <= stats.kv_blocks_total


def _keeps_pace(task: Task) -> bool:
    """Whether a pause would break a stated gap between tokens (DL-14). In the simulator, on code
    and conversations with deadlines for parts at 2 and 3 times the capacity, three seeds each, not
    pausing such rows met 1.01 to 1.08 times as many."""
    is_paced = task.completion_tokens > 0 and task.parts.token_gap_s < math.inf
    return is_paced and task.priority is Priority.INTERACTIVE


def _beyond_shares(jobs: Sequence[PausableJob], over: int) -> list[Attempt]:
    """The ``over`` least urgent of ``jobs``, first from tenants that have more than an equal share
    of the rows."""
    rows = Counter(job.attempt.task.tenant for job in jobs)
    left = list(jobs)
    found: list[Attempt] = []
    while left and len(found) < over:
        share = (len(jobs) - over) / len(rows)
        job = next((j for j in reversed(left) if rows[j.attempt.task.tenant] > share), left[-1])
        left.remove(job)
        rows[job.attempt.task.tenant] -= 1
        found.append(job.attempt)
    return found


def _least_urgent(
    jobs: Sequence[PausableJob], task: Task, rows: Mapping[str, int]
) -> PausableJob | None:
    """The least urgent of ``jobs``, sorted most urgent first, that may make room for ``task``; None
    if none may.

    Batch work pauses only batch work and jobs whose clients do not read. A tenant takes its own
    rows, or rows of a tenant that has more.
    """
    for job in reversed(jobs):
        other = job.attempt.task
        if other.is_unread:
            return job
        if other.priority is Priority.BATCH:
            if task.priority is Priority.INTERACTIVE:
                return job
        elif task.priority is Priority.BATCH:
            continue
        if other.tenant == task.tenant or rows[other.tenant] > rows.get(task.tenant, 0) + 1:
            return job
    return None
