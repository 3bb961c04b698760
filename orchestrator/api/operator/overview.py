"""``/v2/overview``: the service's state for pages and terminals.

While there are watchers, one snapshot per second is taken for all of them. It takes half a
millisecond with 80 waiting requests. Snapshots do not contain prompts, texts or names of tasks.
"""

import asyncio
import math
from collections import Counter
from itertools import islice
from typing import Any

import msgspec
from aiohttp import web

from orchestrator.api.auth import Key
from orchestrator.api.config import CONFIG
from orchestrator.api.http.context import CONTEXT
from orchestrator.api.http.event_stream import EventStream, event_of
from orchestrator.api.operator.instances import describe
from orchestrator.errors import NoCapacity
from orchestrator.fair_share import is_over_share
from orchestrator.health import HealthBoard
from orchestrator.instances.instance import Instance
from orchestrator.prediction.forecaster import Forecaster
from orchestrator.service import Orchestrator
from orchestrator.tasks.task import Task
from orchestrator.tasks.windows import CLASS
from orchestrator.telemetry.log import service_log
from protocol import Outcome

MAX_INSTANCES = 64
MAX_WAITING = 64


def _snapshot(orchestrator: Orchestrator, health: HealthBoard) -> dict[str, Any]:
    """The current state."""
    now = orchestrator.clock.now()
    queue, metrics = orchestrator.queue, orchestrator.stages.settler.metrics
    registry, forecaster = orchestrator.registry, orchestrator.stages.prediction.forecaster
    return {
        "unix_ms": round(1000 * orchestrator.clock.unix()),
        "started_unix": orchestrator.started_unix,
        "status": health.status,
        "models": sorted(orchestrator.models.by_name()),
        "live": orchestrator.live_tasks,
        "queue": {
            "depth": len(queue),
            "bound": queue.bound,
            "background": queue.background,
            "work_ms": round(queue.work_ms, 1),
            "first": [_waiting(task, forecaster, now) for task in queue.first(MAX_WAITING)],
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
            _described(orchestrator, instance) for instance in islice(registry, MAX_INSTANCES)
        ],
    }


def _waiting(task: Task, forecaster: Forecaster, now: float) -> dict[str, object]:
    """A waiting task. ``slack_ms`` is the time that it can wait before it is certain to miss."""
    return {
        "slack_ms": round(task.deadline.left_ms(now) - forecaster.least_ms(task), 1),
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
    """Number of requests by error code, the most frequent first. Misses are not included: they are
    counted by the stage that caused them."""
    counts: Counter[str] = Counter()
    for metric in orchestrator.stages.settler.metrics.outcomes.collect():
        for sample in metric.samples:
            is_missed = sample.labels["outcome"] == Outcome.MISSED
            if sample.name.endswith("_total") and sample.labels["code"] and not is_missed:
                counts[sample.labels["code"]] += int(sample.value)
    return dict(counts.most_common())


def _windows(orchestrator: Orchestrator) -> dict[str, dict[str, float]]:
    """Requests that ended in each recent time window, for all classes together."""
    windows: dict[str, dict[str, float]] = {}
    for name, _, tally, seconds in orchestrator.stages.settler.metrics.windows.by(CLASS):
        window = windows.setdefault(name, {"ended": 0, "met": 0, "seconds": round(seconds, 1)})
        window["ended"] += tally.ended
        window["met"] += tally.met
    return windows


def _described(orchestrator: Orchestrator, instance: Instance) -> dict[str, object]:
    """An instance with its worker's latest report (nulls if there is none) and fields of rooms."""
    described = describe(instance, orchestrator.registry)
    for name in _OF_WORKER:
        described[name] = getattr(instance.stats, name, None)
    for room in orchestrator.rooms:
        described |= room.describe(instance.address, briefly=True)
    return described


_OF_WORKER = (
    *("running", "waiting", "paused", "step_ms"),
    *("kv_blocks_used", "kv_blocks_cached", "kv_blocks_total"),
    *("tokens_total", "cached_tokens_total", "prefill_tokens_total"),
)
"""Fields of a worker's report."""


EVERY_S = 1.0
MAX_WATCHERS = 64


class Overview:
    """Takes snapshots and sends them to all watchers."""

    def __init__(self, orchestrator: Orchestrator, health: HealthBoard) -> None:
        self._orchestrator = orchestrator
        self._health = health
        self.watchers: dict[EventStream, Key] = {}
        """The key of each reader, by its stream."""
        self._taking: asyncio.Task[None] | None = None
        self._taken: dict[bool, bytes] = {}
        """The last snapshot, with (True) and without the names of tenants."""
        self._taken_at = -math.inf

    def latest(self, *, tenants: bool) -> bytes:
        """The last snapshot, or a new one. ``tenants``: whether the reader may see tenants."""
        if self._orchestrator.clock.now() - self._taken_at >= EVERY_S:
            self._take()
        return self._taken[tenants]

    def join(self, stream: EventStream, key: Key) -> bytes:
        """Send every snapshot to ``stream``. Returns its first event. Raises ``NoCapacity``."""
        own = sum(other.fingerprint == key.fingerprint for other in self.watchers.values())
        left = MAX_WATCHERS - len(self.watchers)
        if not left or is_over_share(own, 1, left):
            raise NoCapacity(
                f"there are already {len(self.watchers)} watchers, {own} of them with this key",
                retry_after_ms=10_000,
            )
        self.watchers[stream] = key
        if self._taking is None:
            self._taking = asyncio.create_task(self._keep_taking())
        return event_of("overview", msgspec.Raw(self.latest(tenants=key.sees_tenants)))

    def leave(self, stream: EventStream) -> None:
        """Stop sending snapshots to ``stream``. Without watchers no snapshots are taken."""
        self.watchers.pop(stream, None)
        if self._taking is not None and not self.watchers:
            self._taking.cancel()
            self._taking = None

    def close(self) -> None:
        for stream in self.watchers:
            stream.finish()

    async def _keep_taking(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                self._take()
            except Exception:
                service_log.exception("cannot take an overview; will retry")
                continue
            for stream, key in self.watchers.items():
                stream.offer(event_of("overview", msgspec.Raw(self._taken[key.sees_tenants])))

    def _take(self) -> None:
        taken = _snapshot(self._orchestrator, self._health)
        with_tenants = msgspec.json.encode(taken)
        for task in taken["queue"]["first"]:
            del task["tenant"]
        self._taken = {True: with_tenants, False: msgspec.json.encode(taken)}
        self._taken_at = self._orchestrator.clock.now()


OVERVIEW = web.AppKey("overview", Overview)


async def once(request: web.Request) -> web.Response:
    """Show the current state of the service."""
    body = request.app[OVERVIEW].latest(tenants=request[CONTEXT].key.sees_tenants)
    return web.Response(body=body, content_type="application/json")


async def events(request: web.Request) -> web.StreamResponse:
    """Stream the current state once a second."""
    overview = request.app[OVERVIEW]
    stream = EventStream(request, {}, request.app[CONFIG].keepalive_s)
    first = overview.join(stream, request[CONTEXT].key)
    try:
        return await stream.run(iter((first,)))
    finally:
        overview.leave(stream)


async def close(app: web.Application) -> None:
    """End all streams when the application stops, so that none delays it."""
    app[OVERVIEW].close()


def routes() -> list[web.RouteDef]:
    return [
        web.get("/v2/overview", once),
        # The stream writes directly to the socket, but a response to HEAD must have no body.
        web.get("/v2/overview/events", events, allow_head=False),
    ]
