"""The lifecycle of a service: start, periodic upkeep, drain, close."""

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import suppress

from orchestrator.errors import Draining
from orchestrator.health import HealthBoard
from orchestrator.instances.discovery import DiscoverySync
from orchestrator.instances.monitor import InstanceMonitor
from orchestrator.recovery import Recovery
from orchestrator.service import Orchestrator
from orchestrator.tasks.task import Task
from orchestrator.tasks.verdicts import failed
from orchestrator.telemetry.log import fields, service_log
from orchestrator.telemetry.metrics import MetricRow

UPKEEP_EVERY_S = 0.25
CONFIRM_ABORTS_S = 0.5
"""Seconds that a shutdown waits for workers to confirm the end of aborted jobs."""
COME_BACK_S = 2.0
"""Minimum seconds for which clients can fetch ended work, if the grace period allows: the client of
a task that continues without it may have just lost its connection, and clips are fetched with a
separate request."""


class Lifecycle:
    """Starts, maintains and ends an orchestrator's parts."""

    def __init__(
        self,
        orchestrator: Orchestrator,
        health: HealthBoard,
        discovery: DiscoverySync,
        monitor: InstanceMonitor,
        executor: Executor,
        recovery: Recovery | None = None,
    ) -> None:
        """``executor`` is shut down at the end. ``recovery`` has an earlier process's tasks."""
        self._orchestrator = orchestrator
        self._stages = orchestrator.stages
        self._health = health
        self._discovery = discovery
        self._monitor = monitor
        self._executor = executor
        self._recovery = recovery
        self._is_recovered = False
        self.server_start_ms = 0.0
        """Ms from the start of the process until it listened; set by its server."""
        self._drain_began: float | None = None
        self._drain_s: float | None = None
        orchestrator.metrics.watch(self, _METRICS)
        self._upkeep: asyncio.Task[None] | None = None
        self._background: asyncio.Task[None] | None = None

    async def recover(self) -> None:
        """Take over the tasks that an earlier process accepted, before new ones. Call it before any
        request is served, otherwise ``start`` does it. Yields to the event loop between steps, so
        that probes of the start's progress are answered."""
        for _ in self._recovering():
            await asyncio.sleep(0)

    def _recovering(self) -> Iterator[None]:
        if self._stages.durable is not None and not self._is_recovered:
            self._is_recovered = True
            self._stages.durable.start()
            if self._recovery is not None:
                yield from self._recovery.steps()

    def start(self) -> None:
        """Connect to every instance and start the upkeep."""
        for _ in self._recovering():
            pass
        self._stages.registry.start(self._monitor)
        self._discovery.start()
        for room in self._orchestrator.rooms:
            room.start()
        self._upkeep = asyncio.create_task(self._keep_up())

    def join(self, port: int, keys: str) -> None:
        """Join the orchestrators that share a state, if any; ``keys`` is a digest of the keys."""
        sharing, durable = self._orchestrator.sharing, self._stages.durable
        if durable is not None and self._recovery is not None:
            durable.on_lost = self._let_go
            durable.on_outdone = self._orchestrator.store.forget
            sharing.on_lapsed(durable.check_owned)
            sharing.join(port, keys, self._recovery.take_over, self._may_take_over)

    def _may_take_over(self) -> bool:
        is_draining = self._stages.admission.draining
        return not is_draining and any(one.ready for one in self._stages.registry)

    def _let_go(self, task: Task) -> None:
        """End a task here that another orchestrator took over: it has no outcome here."""
        error = Draining("the task continues on another orchestrator; ask again in a moment")
        self._orchestrator.end(task, failed(error), is_left=True)
        self._orchestrator.store.forget(task)  # requests for it are forwarded there

    def refuse_new_work(self) -> None:
        """From now on answer every submission with 503 ``draining`` (OR-14)."""
        self._stages.admission.draining = True
        self._health.refresh()

    def begin_drain(self, grace_s: float) -> None:
        """Drain without ending the process, until it is stopped or ``undrain`` is called."""
        self._stop_background()
        if self._drain_began is None:
            self._drain_began = self._orchestrator.clock.now()
        self._drain_s = None
        self.refuse_new_work()
        self._background = asyncio.create_task(self._drain(grace_s), name="drain")

    def undrain(self) -> None:
        """Accept new work again. Idempotent. Work that a drain ended stays ended; durable tasks
        that were left to the next process continue in this one."""
        self._stop_background()
        self._drain_began = self._drain_s = None
        self._stages.admission.draining = False
        if self._recovery is not None:
            self._recovery.take_back()
        self._health.refresh()

    @property
    def is_drained(self) -> bool:
        """Whether a drain has completed and was not reversed."""
        return self._drain_s is not None

    async def drain(self, grace_s: float) -> None:
        """Let live tasks end within ``grace_s``, end the rest, and leave no work on any worker.
        Tasks without tokens that will not end in time are ended at once, so that their clients can
        go elsewhere; durable tasks are left to the next process. Clients can fetch tasks without a
        client, and clips, until ``COME_BACK_S`` after their end. A drain that is cancelled and
        called again, for example with less grace, is still the same drain."""
        self._stop_background()
        await self._drain(grace_s)

    def _stop_background(self) -> None:
        background, self._background = self._background, None
        if background is not None:
            background.cancel()

    async def _drain(self, grace_s: float) -> None:
        orchestrator, stages = self._orchestrator, self._stages
        now = orchestrator.clock.now()
        if self._drain_began is None:
            self._drain_began = now
        self.refuse_new_work()
        ends_at = now + grace_s
        early = 0
        while orchestrator.live_tasks and (left_s := ends_at - orchestrator.clock.now()) > 0:
            early += orchestrator.end_hopeless(ends_at)
            await _until(
                lambda: not orchestrator.live_tasks,
                orchestrator.task_over,
                min(left_s, UPKEEP_EVERY_S),
            )
        ends = (room.latest_end for room in orchestrator.rooms)
        latest_end = max((orchestrator.store.latest_end, *ends))
        asked_until = min(ends_at, latest_end + COME_BACK_S)
        await asyncio.sleep(max(0.0, asked_until - orchestrator.clock.now()))
        unfinished = early + orchestrator.live_tasks
        orchestrator.end_all()
        lanes = [lane for instance in stages.registry for lane in instance.lanes]
        await _until(
            lambda: not any(lane.load for lane in lanes),
            stages.dispatcher.attempts_done,
            CONFIRM_ABORTS_S,
        )
        self._drain_s = orchestrator.clock.now() - self._drain_began
        service_log.info(
            "drained",
            extra=fields(duration_ms=round(self.drain_ms, 1), unfinished_tasks=unfinished),
        )

    @property
    def drain_ms(self) -> float:
        if self._drain_began is None:
            return 0.0
        if self._drain_s is not None:
            return 1000 * self._drain_s
        return 1000 * (self._orchestrator.clock.now() - self._drain_began)

    async def close(self) -> None:
        """Close every lane and thread. Call ``drain`` first."""
        self._stop_background()
        if self._upkeep is not None:
            self._upkeep.cancel()
        await self._discovery.close()
        self._monitor.close()
        self._stages.demand.abandon()
        await self._stages.swaps.close()
        for room in self._orchestrator.rooms:
            await room.close()
        await self._stages.registry.close()
        await self._orchestrator.stages.reader.grammars.close()
        if self._orchestrator.tracing is not None:
            await self._orchestrator.tracing.close()
        if self._stages.durable is not None:
            await self._stages.durable.close()
        await self._orchestrator.sharing.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _keep_up(self) -> None:
        stages = self._stages
        while True:
            await asyncio.sleep(UPKEEP_EVERY_S)
            try:
                self._monitor.check_heartbeats()
                stages.dispatcher.upkeep()
                stages.demand.upkeep()
                await self._discovery.remove_retired()
                await stages.registry.replace_exhausted_lanes()
                stages.store.prune()
                if stages.durable is not None:
                    stages.durable.flush()
                for room in self._orchestrator.rooms:
                    room.upkeep()
                self._health.refresh()
            except Exception:
                service_log.exception("upkeep failed; will retry")


async def _until(done: Callable[[], bool], changed: asyncio.Event, limit_s: float) -> None:
    """Wait at most ``limit_s`` seconds for ``done``, which is checked after each ``changed``."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while not done():
                changed.clear()
                await changed.wait()


_METRICS: tuple[MetricRow[Lifecycle], ...] = (
    MetricRow(
        "gauge",
        "graceful_shutdown_duration_ms",
        "ms",
        "Duration of the drain so far; 0 before it begins",
        lambda lifecycle: lifecycle.drain_ms,
    ),
    MetricRow(
        "gauge",
        "http_server_start_duration_ms",
        "ms",
        "From the process's start until it listened (LB-6)",
        lambda lifecycle: lifecycle.server_start_ms,
    ),
)
