"""The service's health, computed in the background so that probes only read bytes (LB-4, OR-13)."""

import logging
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from orchestrator.admission.admission import Admission
from orchestrator.instances.breaker import BreakerState
from orchestrator.instances.gates import describe_gates, gates_of
from orchestrator.instances.instance import Instance
from orchestrator.instances.registry import Registry
from orchestrator.instances.served_models import ServedModels
from orchestrator.queue.task_queue import TaskQueue
from orchestrator.sharing import Sharing
from orchestrator.tasks.journal.durable import DurableTasks
from orchestrator.tasks.task import Task
from orchestrator.telemetry.log import service_log
from orchestrator.telemetry.narration import READINESS, narrate

NEAR_EXHAUSTION = 0.9
"""Share (0 to 1) of the queue's bound above which the service reports ``near_exhaustion``."""

SERVES = ("ready", "near_exhaustion", "degraded")


class PreparedResponse(NamedTuple):
    """A prepared HTTP answer."""

    status: int
    body: bytes


class HealthBoard:
    """The answers of all health endpoints, as of the last ``refresh``."""

    def __init__(
        self,
        registry: Registry,
        models: ServedModels,
        queue: TaskQueue[Task],
        admission: Admission,
        sharing: Sharing,
        durable: DurableTasks | None = None,
    ) -> None:
        self._registry = registry
        self._models = models
        self._queue = queue
        self._admission = admission
        self._durable = durable
        if durable is not None:
            durable.on_fault = self.refresh
        self.live = PreparedResponse(200, b'{"status":"live"}')
        self.startup = PreparedResponse(503, b'{"status":"starting"}')
        self.ready = PreparedResponse(503, b"{}")
        self.overall = PreparedResponse(200, b"{}")
        self.status = "not_ready"
        """State of the service: ``ready``, ``not_ready``, ``draining``, ``near_exhaustion`` (the
        queue is nearly full), ``exhausted`` (it is full), or ``degraded`` (all tasks but durable
        ones are served)."""
        self.has_tenants = False
        """Whether to expect requests of several tenants."""
        self.sharing = sharing
        self.also_ready: list[Callable[[], bool]] = []
        """Checks, one of which is enough to make the service ready for work other than text."""
        self._snapshot_version = -1
        registry.listen(self.instances_changed)
        self.refresh()

    def instances_changed(self) -> None:
        if self._registry.snapshot_version != self._snapshot_version:
            self._snapshot_version = self._registry.snapshot_version
            self.refresh()

    def by_path(self) -> dict[str, PreparedResponse]:
        """The answers by path."""
        return {
            "/health": self.overall,
            "/health/live": self.live,
            "/health/ready": self.ready,
            "/health/startup": self.startup,
        }

    def refresh(self) -> None:
        if self._is_ready_for_other_work() or any(
            instance.card is not None for instance in self._registry
        ):
            self.startup = PreparedResponse(200, b'{"status":"started"}')
        status = self._status()
        if status != self.status:
            level = logging.INFO if status == "ready" else logging.WARNING
            narrate(service_log, READINESS[status], "service", level, status=status)
            self.status = status
        described: dict[str, object] = {
            "status": status,
            "queue": {"depth": len(self._queue), "bound": self._queue.bound},
            "models": sorted(self._models.by_name()),
            "model_gates": self._model_gates(),
            "instances": [
                _describe(instance) | {"gates": describe_gates(instance, self._breaker(instance))}
                for instance in self._registry
            ],
        }
        if (durable := self._durable) is not None:
            described["journal"] = {
                "status": "failing" if durable.fault else "ok",
                "fault": durable.fault or None,
                "live_tasks": durable.live,
                "unwritten": durable.writer.unwritten,
                "set_aside": durable.writer.set_aside or None,
            }
        if (state := self.sharing.describe()) is not None:
            described["state"] = state
        body = msgspec.json.encode(described)
        # A service that can serve some requests is ready: out of rotation it would serve none.
        self.ready = PreparedResponse(200 if status in SERVES else 503, body)
        self.overall = PreparedResponse(200, body)

    def _breaker(self, instance: Instance) -> BreakerState:
        return self._registry.breakers.state(instance.address)

    def _model_gates(self) -> dict[str, dict[str, bool]]:
        """Whether each gate is open on at least one instance of a model, by model."""
        models: dict[str, dict[str, bool]] = {}
        for instance in self._registry:
            if instance.card is not None:
                known = models.setdefault(instance.model, {})
                for name, why in gates_of(instance, self._breaker(instance)).items():
                    known[name] = known.get(name, False) or not why
        return models

    def _is_ready_for_other_work(self) -> bool:
        return any(is_ready() for is_ready in self.also_ready)

    def _status(self) -> str:
        if self._admission.draining:
            return "draining"
        breakers = self._registry.breakers
        if not any(i.ready and not breakers.dark_s(i.address) for i in self._registry):
            return "ready" if self._is_ready_for_other_work() else "not_ready"
        queue = self._queue
        if queue.bound > 0 and queue.new > NEAR_EXHAUSTION * queue.bound:
            return "near_exhaustion" if queue.lets_in(others=self.has_tenants) else "exhausted"
        is_failing = self._durable is not None and bool(self._durable.fault)
        return "degraded" if is_failing or self.sharing.fault else "ready"


def _describe(instance: Instance) -> dict[str, object]:
    """One instance for ``/health``. Cached KV blocks count as free: they are evicted on demand."""
    described: dict[str, object] = {
        "address": instance.address,
        **instance.describe_state(),
        "draining": instance.draining or instance.cordoned,
        "fault": instance.fault,
        "chat_fault": instance.chat_fault,
        "model": instance.model or None,
        "load": instance.load,
    }
    stats = instance.stats
    if stats is not None:
        cached, prompts = stats.cached_tokens_total, stats.prefill_tokens_total
        described |= {
            "running": stats.running,
            "waiting": stats.waiting,
            "kv_blocks_used": stats.kv_blocks_used,
            "kv_blocks_total": stats.kv_blocks_total,
            # Share (0 to 1) of prompt tokens saved by the prefix cache (WK-5)
            "prefix_hit_rate": round(cached / (cached + prompts), 4) if cached + prompts else None,
        }
    return described
