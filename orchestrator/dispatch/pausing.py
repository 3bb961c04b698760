"""Which running jobs make room for more urgent work (DL-15).

A paused job keeps its KV where it is and its place among the waiting by its urgency, so it goes on
without computing anything again. It is paused only for work that is clearly more urgent, and only a
few times for what it gets done. What a client is not reading is less urgent than anything, and goes
on once it reads.

Who gets the slot waits in the queue, or inside the worker already: among those that wait there the
worker begins with the one that has the least slack.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.dispatch.attempt import Attempt
from orchestrator.instances.instance import Instance
from orchestrator.instances.registry import Registry
from orchestrator.placement import Placer
from orchestrator.prediction.forecaster import Forecaster
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.tasks.job import Priority
from orchestrator.tasks.task import Stage, Task

MOST_PAUSES, TOKENS_PER_PAUSE = 4, 16
"""One job is paused so often, and once more for each so many tokens that it has made: a long one
makes room again and again, and gets on nevertheless. Workers keep to it too."""
MOST_MEMORY = 0.5
"""Of an instance's KV memory, that paused jobs may hold before more are paused."""
SCAN_S_PER_JOB = 0.0002
"""Between two scans of what runs, which take some 20 µs a job: up to a tenth of the time."""
PATIENCE_S = 0.05
"""Whoever waits inside a worker mostly has a slot by then: only afterwards is one made for it."""
AT_ONCE = 8
"""Waiting tasks that room is made for at a time."""
_MARGIN = math.log(1.6)
"""How much more urgent, as a logarithm: less would trade places for nothing. In the simulator, at
twice the capacity with 64 slots, 3 met 0.594 and 0.587 of two loads, 1.6 0.605 and 0.620, 1.2 no
more than that."""


@dataclass(slots=True)
class PauseStats:
    """Totals, for metrics."""

    paused: int = 0
    resumed: int = 0


class Running(NamedTuple):
    """A job that may be paused."""

    urgency: float
    attempt: Attempt


class Swap(NamedTuple):
    """Who gets a slot, and who leaves it."""

    waiting: Task
    running: Attempt


class Room(NamedTuple):
    """Tasks that were paused, and those that wait inside other workers and are to have their slots:
    these have to be taken back from there."""

    paused: list[Task]
    recalled: list[Task]


class Pausing:
    """Decides which running jobs are paused, pauses and resumes them."""

    def __init__(
        self, registry: Registry, forecaster: Forecaster, placer: Placer, *, enabled: bool
    ) -> None:
        self.stats = PauseStats()
        self._registry = registry
        self._forecaster = forecaster
        self._placer = placer
        self._enabled = enabled
        self._next_at = 0.0

    @property
    def is_wanted_inside(self) -> bool:
        """Whether some wait for a slot inside a worker that can pause others for them."""
        return self._enabled and any(
            instance.can_pause and instance.has_waiting
            for instance in self._registry.instances.values()
        )

    @property
    def has_surplus(self) -> bool:
        """Whether more rows run somewhere than should, and can be paused."""
        return self._enabled and any(
            instance.can_pause and instance.load > instance.concurrency.most_rows
            for instance in self._registry.instances.values()
        )

    def is_due(self, now: float) -> bool:
        """Whether ``victims`` would scan what runs."""
        return self._enabled and now >= self._next_at

    def make_room(self, queue: TaskQueue[Task], attempts: Iterable[Attempt], now: float) -> Room:
        """Pause running jobs for more urgent ones that wait."""
        room = Room([], [])
        if self.has_surplus and self.is_due(now):
            for attempt in self.surplus(attempts, now):
                self._pause(attempt, now, for_another=False)
                room.paused.append(attempt.task)
        for waiting, attempt in self.victims(queue, attempts, now):
            self._pause(attempt, now)
            room.paused.append(attempt.task)
            if waiting.stage is Stage.DISPATCHED and waiting.instance != attempt.address:
                room.recalled.append(waiting)
        return room

    def _pause(self, attempt: Attempt, now: float, *, for_another: bool = True) -> None:
        task = attempt.task
        attempt.pause(for_another=for_another)
        self.stats.paused += 1
        task.pauses += 1
        task.paused_on = attempt.address
        task.paused_at = now
        task.time_spent.waits(now)

    def surplus(self, attempts: Iterable[Attempt], now: float) -> list[Attempt]:
        """What runs beyond the number of rows that is best, the least urgent first."""
        found: list[Attempt] = []
        for name, jobs in self._by_instance(attempts, now).items():
            instance = self._registry.instances[name]
            over = instance.load - instance.concurrency.most_rows
            if over > 0 and self._may_hold_more(instance):
                found += _beyond_shares(jobs, over)
        return found

    @staticmethod
    def _may_hold_more(instance: Instance) -> bool:
        """Whether paused jobs hold less of its KV memory than they may."""
        stats = instance.stats
        if stats is None or not stats.kv_blocks_total:
            return True
        return instance.concurrency.paused_blocks <= MOST_MEMORY * stats.kv_blocks_total

    def resume(self, task: Task, now: float) -> None:
        """A paused job has a slot again."""
        attempt = task.attempt
        assert isinstance(attempt, Attempt) and attempt.is_paused
        task.paused_on = ""
        task.prompt_ready_at += now - task.paused_at
        task.time_spent.resumed(now)
        self.stats.resumed += 1
        attempt.resume(self._registry.instances[attempt.address].load)

    def victims(
        self, queue: TaskQueue[Task], attempts: Iterable[Attempt], now: float
    ) -> list[Swap]:
        """Jobs to pause, at most one for each of the first waiting tasks."""
        if not (queue or self.is_wanted_inside) or not self.is_due(now):
            return []
        attempts = list(attempts)
        # With many jobs a scan is expensive, and urgent work can wait so long.
        self._next_at = now + SCAN_S_PER_JOB * len(attempts)
        running = self._by_instance(attempts, now)
        rows = _rows_of(running)
        chosen: list[Swap] = []
        # By urgency alone: a tenant whose turn it is may have nothing that is worth a pause.
        for task in (*self._inside(attempts, now), *queue.first(AT_ONCE)):
            if not running:
                break
            if task.is_background:
                continue
            urgency = self._forecaster.urgency(task, now).log_urgency
            if urgency < min(jobs[-1].urgency for jobs in running.values()) + _MARGIN:
                continue
            least = self._victim(task, urgency, running, rows)
            if least is None:
                continue
            jobs = running[least.attempt.address]
            jobs.remove(least)
            chosen.append(Swap(task, least.attempt))
            if not jobs:
                del running[least.attempt.address]
        return chosen

    def _victim(
        self,
        task: Task,
        urgency: float,
        running: Mapping[str, Sequence[Running]],
        rows: Mapping[str, Counter[str]],
    ) -> Running | None:
        """The least urgent job that may make room for ``task``; on its own instance, if it has
        been sent to one and there is any."""
        found = [
            job
            for name in self._placer.able(task)
            if (job := _least_urgent(running.get(name, ()), task, rows.get(name, {}))) is not None
            and job.urgency + _MARGIN <= urgency
            and (task.paused_on == name or self._has_memory(name, task))
        ]
        here = [job for job in found if job.attempt.address == task.instance]
        return min(here or found, key=lambda job: job.urgency, default=None)

    def _inside(self, attempts: Iterable[Attempt], now: float) -> list[Task]:
        """What has waited for a slot inside a worker for long, but for those that a slot is being
        cleared for."""
        waiting = {
            name: list[Task]()
            for name, instance in self._registry.instances.items()
            if instance.can_pause and instance.has_waiting
        }
        for attempt in attempts:
            task = attempt.task
            if attempt.has_slot or task.attempt is not attempt or task.hedge is not None:
                continue
            # What was paused there, and is to go on, does so before all others.
            if task.stage is not Stage.DISPATCHED or now < attempt.dispatched_at + PATIENCE_S:
                continue
            if attempt.address in waiting:
                waiting[attempt.address].append(task)
        found: list[Task] = []
        for name, tasks in waiting.items():
            tasks.sort(key=lambda task: -self._forecaster.urgency(task, now).log_urgency)
            found += tasks[self._registry.instances[name].concurrency.clearing :]
        return found

    def _by_instance(self, attempts: Iterable[Attempt], now: float) -> dict[str, list[Running]]:
        """What may be paused, by instance, the least urgent last."""
        full = {
            name: list[Running]()
            for name, instance in self._registry.instances.items()
            if instance.can_pause and not instance.has_free_slot
        }
        for attempt in attempts:
            task, jobs = attempt.task, full.get(attempt.address)
            if jobs is None:
                continue
            if task.attempt is not attempt or attempt.is_paused or task.hedge is not None:
                continue
            if task.is_promised and not task.is_unread:
                continue  # we named its deadline ourselves: it is not traded away
            if not attempt.has_slot or attempt.pauses >= _most_pauses(attempt):
                continue
            urgency = (
                -math.inf
                if task.is_unread
                else self._forecaster.urgency_of_running(task, now).log_urgency
            )
            jobs.append(Running(urgency, attempt))
        for jobs in full.values():
            jobs.sort(key=lambda job: -job.urgency)
        return {name: jobs for name, jobs in full.items() if jobs}

    def _has_memory(self, name: str, task: Task) -> bool:
        """Whether the instance's KV memory has room for ``task`` beside all its other jobs."""
        instance = self._registry.instances[name]
        stats = instance.stats
        if stats is None or not stats.kv_blocks_total or not task.block_tokens:
            return True
        is_counted = task.stage is Stage.DISPATCHED and task.instance == name
        tokens = 0 if is_counted else task.prompt_tokens + task.sampling.max_tokens
        concurrency, total = instance.concurrency, stats.kv_blocks_total
        if concurrency.paused_blocks > MOST_MEMORY * total:
            return False
        return concurrency.blocks - (-tokens // task.block_tokens) <= total


def _most_pauses(attempt: Attempt) -> int:
    """As its worker counts, which does not know of tokens that other instances made."""
    made = attempt.task.completion_tokens - attempt.begun_tokens
    return MOST_PAUSES + made // TOKENS_PER_PAUSE


def _beyond_shares(jobs: Sequence[Running], over: int) -> list[Attempt]:
    """The least urgent of ``jobs``, ``over`` of them; each of the tenant that has the most rows, of
    those that have any as little urgent."""
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


def _rows_of(running: Mapping[str, Sequence[Running]]) -> dict[str, Counter[str]]:
    """By instance: how many rows each tenant has."""
    return {
        name: Counter(job.attempt.task.tenant for job in jobs) for name, jobs in running.items()
    }


def _least_urgent(jobs: Sequence[Running], task: Task, rows: Mapping[str, int]) -> Running | None:
    """The last of ``jobs`` that may make room for ``task``: batch work pauses its like only, and
    what is not read; a tenant takes rows of its own, or of one that has more of them.
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
