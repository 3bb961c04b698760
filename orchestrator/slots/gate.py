"""Checks that refuse a slot before anything is worked out for it."""

from contextlib import ExitStack

from orchestrator.admission.admission import Admission
from orchestrator.admission.rate_limits import Limiter
from orchestrator.clock import Clock
from orchestrator.errors import Draining
from orchestrator.slots.slot import Slot


class SlotGate:
    """The checks that slots share with tasks: the drain, the limits of keys, the floor."""

    def __init__(
        self,
        admission: Admission,
        limits: Limiter,
        clock: Clock,
        *,
        floor_ms: float,
    ) -> None:
        self._admission = admission
        self._limits = limits
        self._clock = clock
        self._floor_ms = floor_ms

    def enter(self, slot: Slot) -> None:
        """Count the slot until its end. Raises ``Draining``, ``DeadlineExceeded``,
        ``RateLimited``."""
        if self._admission.draining:
            raise Draining("the service is going down and takes no new work")
        slot.deadline.require(self._floor_ms, self._clock.now())
        counted = ExitStack()
        counted.enter_context(self._limits.counted(slot.job.key))
        slot.on_end.append(lambda _: counted.close())
