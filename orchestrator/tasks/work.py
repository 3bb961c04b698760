"""The common part of tasks and clips: progress, listeners and one ending (DL-10).

Work goes back to the queue only if its instance is lost or refuses it (OR-10)::

    RECEIVED ─▶ QUEUED ─▶ DISPATCHED ─▶ RUNNING ─▶ ENDED
        │          │ ▲────────┴─────────────┘ ▲
        └──────────┴──────────────────────────┘

Everything here runs on the event loop's thread and never waits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from orchestrator.clock import Timer
from orchestrator.tasks.deadline import NO_PARTS, Deadline, Parts
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.job import OnDisconnect
from orchestrator.telemetry.log import Field, fields, service_log
from orchestrator.telemetry.narration import DISCONNECTED, TOO_SLOW, narrate
from orchestrator.telemetry.trace_context import TraceContext


class Stage(IntEnum):
    """The progress of work."""

    RECEIVED = 0
    QUEUED = 1
    DISPATCHED = 2
    RUNNING = 3
    ENDED = 4


@dataclass(slots=True)
class Marks:
    """When each stage began, in seconds of the clock; 0 if it has not begun."""

    received: float
    queued: float = 0.0
    dispatched: float = 0.0
    started: float = 0.0
    first_token: float = 0.0
    ended: float = 0.0

    @property
    def has_started(self) -> bool:
        """Whether the last worker has started the work; ``started`` may be an earlier worker's."""
        return 0 < self.started >= self.dispatched


class Stated(Protocol):
    """The common part of clients' requests for all work."""

    @property
    def deadline(self) -> Deadline: ...
    @property
    def correlation_id(self) -> str: ...
    @property
    def arrived(self) -> float: ...
    @property
    def on_disconnect(self) -> OnDisconnect: ...
    @property
    def key(self) -> str: ...
    @property
    def trace(self) -> TraceContext | None: ...


class Hearer(Protocol):
    """The common part of listeners for all work."""

    def ended(self, work: Any, /) -> None:
        """The work has ended and its ``ending`` is set; the last event."""


J = TypeVar("J", bound=Stated)
L = TypeVar("L", bound=Hearer)


class WorkItem(Generic[J, L]):
    """One submitted piece of work, from its submission to its ending."""

    __slots__ = (
        "attempts",
        "correlation_id",
        "deadline",
        "ending",
        "failed_on",
        "id",
        "instance",
        "job",
        "listeners",
        "marks",
        "model",
        "on_end",
        "parts",
        "refusal_sample",
        "stage",
        "timer",
    )
    what: ClassVar[str]

    def __init__(self, work_id: str, job: J, parts: Parts = NO_PARTS) -> None:
        self.id = work_id
        self.job = job
        self.deadline = job.deadline
        self.parts = parts
        self.correlation_id = job.correlation_id
        self.stage = Stage.RECEIVED
        self.marks = Marks(job.arrived)
        self.refusal_sample = False
        """Whether it was let through despite a refusal, to measure whether the refusal was right
        (DL-7): only its deadline stops it."""
        self.attempts = 0
        """Number of instances that did not finish it."""
        self.failed_on: frozenset[str] = frozenset()
        self.model = ""
        """The model's own name; empty until the model is known."""
        self.instance = ""
        self.listeners: list[L] = []
        self.on_end: list[Callable[[Self], None]] = []
        """Called after the listeners."""
        self.timer: Timer | None = None
        self.ending: Ending | None = None

    @property
    def served_name(self) -> str:
        return self.model

    def names(self) -> dict[str, Field]:
        return {f"{self.what}_id": self.id, "correlation_id": self.correlation_id}

    def listen(self, listener: L) -> None:
        """Add a listener, which gets all later events. Ended work has no events."""
        self.listeners = [*self.listeners, listener]

    def unlisten(self, listener: L) -> None:
        """Remove a listener; no effect if it was never added."""
        self.listeners = [other for other in self.listeners if other is not listener]

    def client_gone(self, *, too_slow: bool) -> bool:
        """Record that its client disconnected; returns whether the work must end (WP-1)."""
        if self.ending is not None:
            return False
        told = TOO_SLOW if too_slow else DISCONNECTED
        narrate(service_log, told, self.served_name, **self.names())
        return self.job.on_disconnect is OnDisconnect.CANCEL

    def end(self, ending: Ending, now: float) -> None:
        """End the work, only once. Callers check ``ending`` first."""
        assert self.ending is None, f"{self.what} {self.id} would end twice"
        self.ending = ending
        self.stage = Stage.ENDED
        self.marks.ended = now
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        self._release(ending)
        listeners, self.listeners = self.listeners, []
        for call in (*(listener.ended for listener in listeners), *self.on_end):
            try:
                call(self)
            except Exception:  # limits, stores and callers depend on the others
                service_log.exception(
                    "a listener failed at the end of a %s", self.what, extra=fields(**self.names())
                )

    def _release(self, ending: Ending) -> None:
        """Drop data that only live work needs, and stop its job on an instance."""


AnyWork = WorkItem[Any, Any]
