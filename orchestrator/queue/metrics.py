"""Metrics of the tasks that wait."""

from typing import Any

from orchestrator.queue.task_queue import TaskQueue
from orchestrator.telemetry.metrics import Row

QUEUE: tuple[Row[TaskQueue[Any]], ...] = (
    Row("gauge", "queue_depth", "tasks", "Tasks that wait", len),
    Row(
        "gauge",
        "queue_background",
        "tasks",
        "Waiting tasks that have next to no chance of being in time",
        lambda queue: queue.background,
    ),
    Row(
        "gauge",
        "queue_work_ms",
        "ms",
        "Engine time that all waiting tasks will probably take",
        lambda queue: queue.work_ms,
    ),
)
