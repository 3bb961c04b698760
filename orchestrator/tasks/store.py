"""Tasks that can be asked about: running ones, and as many ended ones as the bounds allow."""

from orchestrator.clock import Clock
from orchestrator.retention import KeptStore, Retention
from orchestrator.tasks.job import OnDisconnect
from orchestrator.tasks.task import Task


class TaskStore(KeptStore[Task]):
    """Tasks by id, with all that they produced (``Task.kept_bytes``)."""

    def __init__(self, clock: Clock, retention: Retention) -> None:
        super().__init__(clock, retention, "task")

    def add(self, task: Task) -> None:
        """Keep a task, with all that it will produce."""
        task.record()
        super().add(task)

    def is_awaited(self, task: Task) -> bool:
        """Whether its client may come back for it. The next process has a durable one."""
        return task.entry is None and task.job.on_disconnect is OnDisconnect.CONTINUE
