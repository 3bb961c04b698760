"""The service at one moment, for people who watch it: no prompts, texts or names of tasks."""

from collections import Counter, deque
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from orchestrator.api.operator.instances import describe
from orchestrator.health import HealthBoard
from orchestrator.instances.instance import Instance
from orchestrator.service import Orchestrator
from orchestrator.tasks.task import Task
from orchestrator.telemetry.log import service_log
from protocol import Outcome

MAX_INSTANCES = 64
MAX_WAITING = 64
MAX_FINISHES = 200
PREDICTIONS_PER_SNAPSHOT = 20
"""Most finishes predicted per snapshot: a forecast behind a long queue takes a millisecond."""


class FinishTimes(NamedTuple):
    """When a task was predicted to end, when it did, and its deadline, in ms since it came."""

    predicted_ms: float
    actual_ms: float
    deadline_ms: float
    outcome: str


class Finishes:
    """Compares predicted and actual ends of tasks, as far as it is told of their admission."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator
        self._left = PREDICTIONS_PER_SNAPSHOT
        self.recent: deque[FinishTimes] = deque(maxlen=MAX_FINISHES)
        self.total = 0
        """Number of finishes so far; the last of them are in ``recent``."""

    def offered(self, task: Task) -> None:
        """Forecast the end of a task that was let in, as a client would be told it."""
        if self._left <= 0 or task.ending is not None:
            return
        self._left -= 1
        try:
            predicted_ms = self._predict(task)
        except Exception:  # the request itself is fine
            service_log.exception("no finish could be predicted for the overview")
            return
        if predicted_ms is not None:
            task.on_end.append(lambda ended: self._ended(ended, predicted_ms))

    def _predict(self, task: Task) -> float | None:
        """Predicted time from a task's arrival to its end, in ms; None while nothing has been
        measured."""
        orchestrator = self._orchestrator
        forecaster = orchestrator.stages.prediction.forecaster
        if not forecaster.capacity_of(task.model).models:
            return None
        wait_ms = orchestrator.predicted_start_ms(task)
        passed_ms = 1000 * (orchestrator.clock.now() - task.marks.received)
        return passed_ms + forecaster.forecast(task, wait_ms=wait_ms).finish_ms

    def next_snapshot(self) -> None:
        """Allow forecasts for the next snapshot."""
        self._left = PREDICTIONS_PER_SNAPSHOT

    def since(self, total: int) -> list[FinishTimes]:
        """The finishes that came after the first ``total``, as far as they are kept."""
        new = min(self.total - total, len(self.recent))
        return list(islice(self.recent, len(self.recent) - new, None))

    def _ended(self, task: Task, predicted_ms: float) -> None:
        ending = task.ending
        if ending is None or ending.outcome not in (Outcome.MET, Outcome.PARTIAL, Outcome.MISSED):
            return
        marks = task.marks
        actual_ms = 1000 * (marks.ended - marks.received)
        deadline_ms = 1000 * (task.deadline.at - marks.received)
        self.recent.append(
            FinishTimes(
                round(predicted_ms, 1),
                round(actual_ms, 1),
                round(deadline_ms, 1),
                ending.outcome.value,
            )
        )
        self.total += 1


def snapshot(orchestrator: Orchestrator, health: HealthBoard) -> dict[str, object]:
    """Everything at this moment except ``Finishes``. Where several ``processes`` share the port,
    these are the figures of the one that is asked, but for what instances report of themselves."""
    now = orchestrator.clock.now()
    queue, metrics = orchestrator.queue, orchestrator.stages.settler.metrics
    registry = orchestrator.registry
    return {
        "unix_ms": round(1000 * orchestrator.clock.unix()),
        "started_unix": orchestrator.started_unix,
        "status": health.status,
        "processes": orchestrator.sharing.processes,
        "models": sorted(orchestrator.models.by_name()),
        "live": orchestrator.live_tasks,
        "queue": {
            "depth": len(queue),
            "bound": queue.bound,
            "background": queue.background,
            "work_ms": round(queue.work_ms, 1),
            "first": [_waiting(task, now) for task in queue.first(MAX_WAITING)],
        },
        "totals": {
            **{outcome.value: count for outcome, count in metrics.settled.items()},
            "tokens": metrics.tokens_generated,
            "tokens_wasted": metrics.tokens_wasted,
        },
        "codes": _codes(orchestrator),
        "blame": {
            sample.labels["stage"]: int(sample.value)
            for metric in metrics.misses.collect()
            for sample in metric.samples
            if sample.value
        },
        "windows": _windows(orchestrator),
        "instances_total": sum(1 for _ in registry),
        "instances": [
            describe(instance, registry)
            | _reported(instance)
            | _added(orchestrator, instance.address)
            for instance in islice(registry, MAX_INSTANCES)
        ],
    }


def without_tenants(taken: dict[str, object]) -> dict[str, object]:
    """A snapshot for readers who may not know of other tenants."""
    queue = taken["queue"]
    assert isinstance(queue, dict)
    first = [{k: v for k, v in task.items() if k != "tenant"} for task in queue["first"]]
    return taken | {"queue": queue | {"first": first}}


def _waiting(task: Task, now: float) -> dict[str, object]:
    """A waiting task. ``slack_ms`` is how long it can still wait before it is certain to miss."""
    return {
        "slack_ms": round(1000 * (task.drop_at - now), 1),
        "left_ms": round(task.deadline.left_ms(now), 1),
        "waited_ms": round(1000 * (now - task.marks.received), 1),
        "work_ms": round(task.work_ms, 1),
        "chance": round(task.chance, 3),
        "priority": task.priority.value,
        "background": task.is_background,
        "paused": bool(task.paused_on),
        "model": task.served_name,
        "tenant": task.tenant,
    }


def _codes(orchestrator: Orchestrator) -> dict[str, int]:
    """Number of requests that ended in each error code, the most frequent first."""
    counts: Counter[str] = Counter()
    for metric in orchestrator.stages.settler.metrics.outcomes.collect():
        for sample in metric.samples:
            if sample.name.endswith("_total") and sample.labels["code"]:
                counts[sample.labels["code"]] += int(sample.value)
    return dict(counts.most_common())


def _windows(orchestrator: Orchestrator) -> dict[str, dict[str, float]]:
    """Requests that ended in each of the recent time windows, all classes together."""
    windows: dict[str, dict[str, float]] = {}
    for name, _, tally, seconds in orchestrator.stages.settler.metrics.windows.by_class():
        window = windows.setdefault(name, {"ended": 0, "met": 0, "seconds": round(seconds, 1)})
        window["ended"] += tally.ended
        window["met"] += tally.met
    return windows


def _reported(instance: Instance) -> dict[str, object]:
    """The latest report of the instance's worker; nulls if there is none."""
    stats = instance.stats
    names = (
        "running",
        "waiting",
        "paused",
        "kv_blocks_used",
        "kv_blocks_cached",
        "kv_blocks_total",
        "tokens_total",
        "cached_tokens_total",
        "prefill_tokens_total",
        "step_ms",
    )
    return {name: None if stats is None else getattr(stats, name) for name in names}


def _added(orchestrator: Orchestrator, address: str) -> dict[str, object]:
    """What rooms add to an instance."""
    added: dict[str, object] = {}
    for room in orchestrator.rooms:
        added |= room.describe(address, briefly=True)
    return added


def point(taken: dict[str, object]) -> Iterator[float]:
    """A snapshot as one row of a history, in the order of ``POINT``."""
    totals, queue, instances = taken["totals"], taken["queue"], taken["instances"]
    assert isinstance(totals, dict) and isinstance(queue, dict) and isinstance(instances, list)
    unix_ms = taken["unix_ms"]
    assert isinstance(unix_ms, int)
    yield unix_ms
    yield from (totals[name] for name in TOTALS)
    yield queue["depth"]
    yield from (sum(each[name] or 0 for each in instances) for name in SUMS)


TOTALS = (*(outcome.value for outcome in Outcome), "tokens", "tokens_wasted")
SUMS = (
    "running",
    "kv_blocks_used",
    "kv_blocks_cached",
    "kv_blocks_total",
    "tokens_total",
    "cached_tokens_total",
    "prefill_tokens_total",
)
POINT = ("unix_ms", *TOTALS, "depth", *SUMS)
"""Names of the columns of a history."""
