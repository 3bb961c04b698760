"""The number of instances that the present load needs to meet its deadlines, for scalers (PF-7).
Running work keeps its slots, because as much follows it. Waiting work needs engine time before its
deadlines: for each deadline, all waiting work due by then, over the time until then. Both together
may take ``TARGET`` of the instances' time. While more than ``MOST_LOST`` of the requests are lost
to waiting or lack of room, or will be, one more instance is needed. Fractions are not rounded:
otherwise a service with rare requests would need more than one on average.
"""

from collections.abc import Iterable
from typing import NamedTuple

from orchestrator.clock import Clock
from orchestrator.instances.registry import Registry
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.tasks.task import Task
from orchestrator.tasks.windows import MissStage, SlidingWindow, Tally, blame
from orchestrator.telemetry.metrics import MetricRow, Samples
from protocol import Code, Outcome

TARGET = 0.8
MOST_LOST = 0.05
LOST_WINDOW_S = 60.0
FEW_ENDED = 20
"""Number of ended requests from which losses are significant."""
SOON_MS = 1000.0
"""Ms until a deadline below which a new instance does not help; shorter times count as this."""


class WaitingWork(NamedTuple):
    """The engine time of a waiting task, and the time until its deadline."""

    work_ms: float
    left_ms: float


def instances_needed(
    up: int, busy: float, waiting: Iterable[WaitingWork], lost: float = 0.0
) -> float:
    """Number of instances that keep the deadlines of running and waiting work; ``up`` are up now.
    ``busy``: taken slots, in units of instances. ``lost``: share (0 to 1) of recent requests lost
    to waiting or lack of room."""
    backlog = due_ms = 0.0
    for work_ms, left_ms in sorted(waiting, key=lambda one: one.left_ms):
        due_ms += work_ms
        backlog = max(backlog, due_ms / max(SOON_MS, left_ms))
    return max((busy + backlog) / TARGET, up + 1 if lost > MOST_LOST else 0)


class Need:
    """The need of each served model. Call ``ended`` at each task's end."""

    def __init__(self, registry: Registry, queue: TaskQueue[Task], clock: Clock) -> None:
        self._registry = registry
        self._queue = queue
        self._clock = clock
        self._kept = SlidingWindow(LOST_WINDOW_S, clock.now())

    def ended(self, task: Task) -> None:
        outcome = Outcome.MISSED if is_lost(task) else Outcome.MET
        self._kept.count((task.model,), outcome, self._clock.now())

    def by_model(self) -> Samples:
        now, registry = self._clock.now(), self._registry
        waiting: dict[str, list[WaitingWork]] = {i.model: [] for i in registry if i.card}
        for task in self._queue.tasks():
            # More instances do not help hopeless requests.
            if task.model in waiting and not task.is_background:
                work = WaitingWork(task.work_ms, task.deadline.left_ms(now))
                waiting[task.model].append(work)
        totals = self._kept.totals(now)
        for model, tasks in waiting.items():
            up = [i for i in registry if i.is_up and i.model == model]
            busy = sum(min(1.0, i.load / i.concurrency.slots) for i in up)
            # Assume that other orchestrators have as much waiting work for their slots.
            slots = sum(i.concurrency.slots for i in up)
            part = sum(i.own_slots for i in up) / slots if slots else 0.0
            tally = totals.get((model,), Tally())
            lost = 1 - tally.met / tally.ended if tally.ended >= FEW_ENDED else 0.0
            scaled = (WaitingWork(one.work_ms / (part or 1.0), one.left_ms) for one in tasks)
            yield (model,), instances_needed(len(up), busy, scaled, lost)


def is_lost(task: Task) -> bool:
    """Whether a task was lost to waiting or lack of room, or refused because it would be."""
    ending = task.ending
    if ending is None:
        return False
    if ending.outcome is Outcome.MISSED:
        return blame(task, ending) is MissStage.QUEUE
    if ending.error is None:
        return False
    if ending.error.code is Code.DEADLINE_INFEASIBLE:  # otherwise more instances do not help
        return ending.error.details.get("binding_constraint") == "queue"
    return ending.error.code in (Code.QUEUE_FULL, Code.NO_CAPACITY)


NEED: tuple[MetricRow[Need], ...] = (
    MetricRow(
        "gauge",
        "instances_needed",
        "instances",
        "Instances, with fractions, that the present load needs to meet its deadlines (PF-7)",
        Need.by_model,
        ("model",),
    ),
)
