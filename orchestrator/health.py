"""How the service is, computed in the background so that a probe only reads bytes (LB-4, OR-13)."""

from dataclasses import dataclass

import msgspec

from orchestrator.admission import Admission
from orchestrator.queue import TaskQueue
from orchestrator.registry import Registry
from orchestrator.task import Task

NEAR_EXHAUSTION = 0.9
"""Share of the queue's bound above which new work should go elsewhere."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A prepared answer."""

    status: int
    body: bytes


class HealthBoard:
    """The answers of all health endpoints, as of the last ``refresh``."""

    def __init__(self, registry: Registry, queue: TaskQueue[Task], admission: Admission) -> None:
        self._registry = registry
        self._queue = queue
        self._admission = admission
        self.live = Probe(200, b'{"status":"live"}')
        self.startup = Probe(503, b'{"status":"starting"}')
        self.ready = Probe(503, b"{}")
        self.overall = Probe(200, b"{}")
        self.refresh()

    def refresh(self) -> None:
        """Prepare all answers anew."""
        if any(instance.card is not None for instance in self._registry):
            self.startup = Probe(200, b'{"status":"started"}')
        status = self._status()
        body = msgspec.json.encode(
            {
                "status": status,
                "queue": {"depth": len(self._queue), "bound": self._queue.bound},
                "models": sorted(self._registry.models()),
                "instances": [
                    {
                        "address": instance.address,
                        "state": instance.state.value,
                        "draining": instance.draining,
                        "reason": instance.reason,
                        "model": None if instance.card is None else instance.card.model,
                        "load": instance.load,
                    }
                    for instance in self._registry
                ],
            }
        )
        self.ready = Probe(200 if status == "ready" else 503, body)
        self.overall = Probe(200, body)

    def _status(self) -> str:
        if self._admission.draining:
            return "draining"
        if not any(instance.ready for instance in self._registry):
            return "not_ready"
        bound = self._queue.bound
        if bound > 0 and len(self._queue) > NEAR_EXHAUSTION * bound:
            return "near_exhaustion"
        return "ready"
