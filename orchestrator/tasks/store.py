"""Tasks that can be asked about: running ones, and as many ended ones as the bounds allow."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator

from orchestrator.clock import Clock
from orchestrator.errors import NotFound
from orchestrator.tasks.job import OnDisconnect
from orchestrator.tasks.task import Task


def no_such_task(task_id: str) -> NotFound:
    """The answer for an unknown id, and for a task that is not the caller's."""
    return NotFound(f"there is no task {task_id[:64]!r}; ended ones are kept for a while only")


class TaskStore:
    """Tasks by id. An ended one is dropped by count, by age, or when all kept ones come to too many
    tokens or bytes (``Task.kept_bytes``)."""

    def __init__(
        self, clock: Clock, *, max_tasks: int, max_age_s: float, max_tokens: int, max_bytes: int
    ) -> None:
        self.on_forget: list[Callable[[Task], None]] = []
        """Called with each task that is dropped."""
        self.latest_end = -math.inf
        """When the last task ended whose client may come back for it, and finds it here only."""
        self._clock = clock
        self._max_tasks = max_tasks
        self._max_age_s = max_age_s
        self._max_tokens = max_tokens
        self._max_bytes = max_bytes
        self._running: dict[str, Task] = {}
        self._ended: OrderedDict[str, Task] = OrderedDict()
        self._bytes: dict[str, int] = {}
        """Bytes of each ended task, by id."""
        self._tokens = 0
        self._total_bytes = 0

    def __len__(self) -> int:
        return len(self._running) + len(self._ended)

    def __contains__(self, task: Task) -> bool:
        return task.id in self._running or task.id in self._ended

    def add(self, task: Task) -> None:
        """Keep a task, with all that it will produce."""
        task.record()
        task.on_end.append(self._task_ended)
        self._running[task.id] = task

    def get(self, task_id: str) -> Task:
        """The task of that id. Raises ``NotFound``."""
        self.prune()
        task = self._running.get(task_id) or self._ended.get(task_id)
        if task is None:
            raise no_such_task(task_id)
        return task

    def ended(self) -> Iterator[Task]:
        """Tasks that have ended, the newest first."""
        self.prune()
        return reversed(self._ended.values())

    def prune(self) -> None:
        """Drop ended tasks beyond a bound, the oldest first."""
        oldest_kept = self._clock.now() - self._max_age_s
        while self._ended:
            task = next(iter(self._ended.values()))
            if (
                len(self._ended) <= self._max_tasks
                and self._tokens <= self._max_tokens
                and self._total_bytes <= self._max_bytes
                and task.marks.ended >= oldest_kept
            ):
                return
            self.forget(task)

    def forget(self, task: Task) -> None:
        """Drop a task that has ended. Idempotent."""
        if self._ended.get(task.id) is not task:
            return
        del self._ended[task.id]
        self._tokens -= task.completion_tokens
        self._total_bytes -= self._bytes.pop(task.id)
        for call in self.on_forget:
            call(task)

    def _task_ended(self, task: Task) -> None:
        del self._running[task.id]
        self._ended[task.id] = task
        if task.entry is None and task.job.on_disconnect is OnDisconnect.CONTINUE:
            self.latest_end = task.marks.ended
        self._tokens += task.completion_tokens
        self._bytes[task.id] = task.kept_bytes
        self._total_bytes += self._bytes[task.id]
        self.prune()
