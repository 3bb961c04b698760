"""Which running jobs make room for more urgent work (DL-15).

A paused job keeps its KV where it is and its place among the waiting by its urgency, so it goes on
without computing anything again. It is paused only for work that is clearly more urgent, and only a
few times. What a client is not reading is less urgent than anything, and goes on once it reads.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from orchestrator.dispatch.attempt import Attempt
from orchestrator.instances.registry import Registry
from orchestrator.placement import Placer
from orchestrator.prediction.forecaster import Forecaster
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.tasks.job import Priority
from orchestrator.tasks.task import Stage, Task

MOST_PAUSES = 4
"""Of one job; workers keep to it too."""
MOST_MEMORY = 0.5
"""Of an instance's KV memory, that paused jobs may hold before more are paused."""
SCAN_S_PER_JOB = 0.0002
"""Between two scans of what runs, which take some 20 µs a job: up to a tenth of the time."""
AT_ONCE = 8
"""Waiting tasks that room is made for at a time."""
_MARGIN = math.log(3.0)
"""How much more urgent, as a logarithm: less would trade places for nothing. In the simulator 1.5
and 3 met the same below capacity, 3 a hundredth more at twice the capacity, with less waste."""


@dataclass(slots=True)
class PauseStats:
    """Totals, for metrics."""

    paused: int = 0
    resumed: int = 0


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

    def is_due(self, now: float) -> bool:
        """Whether ``victims`` would scan what runs."""
        return self._enabled and now >= self._next_at

    def make_room(
        self, queue: TaskQueue[Task], attempts: Iterable[Attempt], now: float
    ) -> list[Task]:
        """Pause running jobs for more urgent ones that wait; those paused are to be queued."""
        victims = self.victims(queue, attempts, now)
        for attempt in victims:
            task = attempt.task
            attempt.pause()
            self.stats.paused += 1
            task.pauses += 1
            task.paused_on = attempt.address
            task.paused_at = now
        return [attempt.task for attempt in victims]

    def resume(self, task: Task, now: float) -> None:
        """A paused job has a slot again."""
        attempt = task.attempt
        assert isinstance(attempt, Attempt) and attempt.is_paused
        task.paused_on = ""
        task.prompt_ready_at += now - task.paused_at
        self.stats.resumed += 1
        attempt.resume(self._registry.instances[attempt.address].load)

    def victims(
        self, queue: TaskQueue[Task], attempts: Iterable[Attempt], now: float
    ) -> list[Attempt]:
        """Jobs to pause, at most one for each of the first waiting tasks."""
        if not queue or not self.is_due(now):
            return []
        attempts = list(attempts)
        # With many jobs a scan is expensive, and urgent work can wait so long.
        self._next_at = now + SCAN_S_PER_JOB * len(attempts)
        running = self._by_instance(attempts, now)
        chosen: list[Attempt] = []
        for task in islice(queue, AT_ONCE):
            if not running or task.is_background:
                break
            urgency = self._forecaster.urgency(task, now).log_urgency
            if urgency < min(jobs[-1][0] for jobs in running.values()) + _MARGIN:
                continue
            least: tuple[float, Attempt] | None = None
            for name in self._placer.able(task):
                job = _least_urgent(running.get(name, ()), task)
                if job is not None and (least is None or job[0] < least[0]):
                    if task.paused_on != name and not self._has_memory(name, task):
                        continue
                    least = job
            if least is None or urgency < least[0] + _MARGIN:
                continue
            jobs = running[least[1].address]
            jobs.remove(least)
            chosen.append(least[1])
            if not jobs:
                del running[least[1].address]
        return chosen

    def _by_instance(
        self, attempts: Iterable[Attempt], now: float
    ) -> dict[str, list[tuple[float, Attempt]]]:
        """What may be paused, by instance, the least urgent last."""
        full = {
            name: list[tuple[float, Attempt]]()
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
            if task.stage is not Stage.RUNNING or task.pauses >= MOST_PAUSES:
                continue
            urgency = (
                -math.inf
                if task.is_unread
                else self._forecaster.urgency_of_running(task, now).log_urgency
            )
            jobs.append((urgency, attempt))
        for jobs in full.values():
            jobs.sort(key=lambda job: -job[0])
        return {name: jobs for name, jobs in full.items() if jobs}

    def _has_memory(self, name: str, task: Task) -> bool:
        """Whether the instance's KV memory has room for ``task`` beside all its jobs."""
        instance = self._registry.instances[name]
        stats = instance.stats
        if stats is None or not stats.kv_blocks_total or not task.block_tokens:
            return True
        tokens = task.prompt_tokens + task.sampling.max_tokens
        concurrency, total = instance.concurrency, stats.kv_blocks_total
        if concurrency.paused_blocks > MOST_MEMORY * total:
            return False
        return concurrency.blocks - (-tokens // task.block_tokens) <= total


def _least_urgent(
    jobs: Sequence[tuple[float, Attempt]], task: Task
) -> tuple[float, Attempt] | None:
    """The last of ``jobs`` that may make room for ``task``: batch work pauses its like only, and
    what is not read.
    """
    if task.priority is Priority.INTERACTIVE:
        return jobs[-1] if jobs else None
    for job in reversed(jobs):
        if job[1].task.is_unread or job[1].task.priority is Priority.BATCH:
            return job
    return None
