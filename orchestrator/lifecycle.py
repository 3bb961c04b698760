"""One service's life: start, periodic upkeep, drain, close."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from contextlib import suppress

from orchestrator.health import HealthBoard
from orchestrator.instances.discovery import DiscoverySync
from orchestrator.instances.monitor import InstanceMonitor
from orchestrator.recovery import Recovery
from orchestrator.service import Orchestrator
from orchestrator.telemetry.log import fields, service_log
from orchestrator.telemetry.metrics import Row

UPKEEP_EVERY_S = 0.25
CONFIRM_ABORTS_S = 0.5
"""How long the end waits for workers to confirm that aborted jobs are gone."""


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
        """``executor`` is shut down at the end. ``recovery`` has what an earlier process left."""
        self._orchestrator = orchestrator
        self._stages = orchestrator.stages
        self._health = health
        self._discovery = discovery
        self._monitor = monitor
        self._executor = executor
        self._recovery = recovery
        self._is_recovered = False
        self.server_start_ms = 0.0
        """From the process's start until it listened; whoever makes it listen says so."""
        self._drain_began: float | None = None
        self._drain_s: float | None = None
        orchestrator.metrics.watch(self, _METRICS)
        self._upkeep: asyncio.Task[None] | None = None

    def recover(self) -> None:
        """Take on what an earlier process had let in, which goes before what comes now: to be
        called before anybody is served, else by ``start``.
        """
        if self._stages.durable is not None and not self._is_recovered:
            self._stages.durable.start()
            if self._recovery is not None:
                self._recovery.start()
        self._is_recovered = True

    def start(self) -> None:
        """Connect to every instance and begin the upkeep."""
        self.recover()
        self._stages.registry.start(self._monitor)
        self._discovery.start()
        self._stages.slots.start()
        self._upkeep = asyncio.create_task(self._keep_up())

    def refuse_new_work(self) -> None:
        """From now on every offer is answered with 503 ``draining`` (OR-14)."""
        self._stages.admission.draining = True
        self._health.refresh()

    async def drain(self, grace_s: float) -> None:
        """Let live tasks end within ``grace_s``, end the rest, and leave no work on any worker.

        Cancelled and called again, as with less grace, it is one drain still.
        """
        orchestrator, stages = self._orchestrator, self._stages
        if self._drain_began is None:
            self._drain_began = orchestrator.clock.now()
        self.refuse_new_work()
        await _until(lambda: not orchestrator.live_tasks, orchestrator.task_over, grace_s)
        unfinished = orchestrator.live_tasks
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
        """How long the drain has taken: so far while it lasts, 0 before."""
        if self._drain_began is None:
            return 0.0
        if self._drain_s is not None:
            return 1000 * self._drain_s
        return 1000 * (self._orchestrator.clock.now() - self._drain_began)

    async def close(self) -> None:
        """Close every lane and thread. Call ``drain`` before."""
        if self._upkeep is not None:
            self._upkeep.cancel()
        await self._discovery.close()
        self._monitor.close()
        await self._stages.slots.close()
        await self._stages.registry.close()
        await self._orchestrator.grammars.close()
        if self._orchestrator.tracing is not None:
            await self._orchestrator.tracing.close()
        if self._stages.durable is not None:
            await self._stages.durable.close()
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _keep_up(self) -> None:
        stages = self._stages
        while True:
            await asyncio.sleep(UPKEEP_EVERY_S)
            try:
                self._monitor.check_heartbeats()
                stages.dispatcher.upkeep()
                await self._discovery.remove_retired()
                stages.store.prune()
                stages.sessions.prune()
                if stages.durable is not None:
                    stages.durable.flush()
                stages.slots.upkeep()
                self._health.refresh()
            except Exception:
                service_log.exception("upkeep failed; will retry")


async def _until(done: Callable[[], bool], changed: asyncio.Event, limit_s: float) -> None:
    """Wait until ``done``, which is asked after each ``changed``, but no longer than the limit."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while not done():
                changed.clear()
                await changed.wait()


_METRICS: tuple[Row[Lifecycle], ...] = (
    Row(
        "gauge",
        "graceful_shutdown_duration_ms",
        "ms",
        "How long the drain has taken so far; 0 before it begins",
        lambda lifecycle: lifecycle.drain_ms,
    ),
    Row(
        "gauge",
        "http_server_start_duration_ms",
        "ms",
        "From the process's start until it listened (LB-6)",
        lambda lifecycle: lifecycle.server_start_ms,
    ),
)
