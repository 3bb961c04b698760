"""The common part of tasks and clips: progress, listeners and one ending (DL-10).

Work goes back to the queue only if its instance is lost or refuses it (OR-10)::

    RECEIVED ─▶ QUEUED ─▶ DISPATCHED ─▶ RUNNING ─▶ ENDED
        │          │ ▲────────┴─────────────┘ ▲
        └──────────┴──────────────────────────┘

Everything here runs on the event loop's thread and never waits.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

from orchestrator.clock import Timer
from orchestrator.tasks.deadline import NO_PARTS, Deadline, Parts
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.job import OnDisconnect, Stated
from orchestrator.telemetry.log import Field, fields, service_log
from orchestrator.telemetry.narration import DISCONNECTED, TOO_SLOW, narrate


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


class Hearer(Protocol):
    """The common part of listeners for all work."""

    def ended(self, work: Any, /) -> None:
        """The work has ended and its ``ending`` is set; the last event."""


J = TypeVar("J", bound=Stated)
L = TypeVar("L", bound=Hearer)


@dataclass(slots=True, eq=False, repr=False)
class WorkItem(Generic[J, L]):
    """One submitted piece of work, from its submission to its ending."""

    what: ClassVar[str]

    id: str
    job: J
    deadline: Deadline = field(init=False)
    parts: Parts = NO_PARTS
    correlation_id: str = field(init=False)
    stage: Stage = Stage.RECEIVED
    marks: Marks = field(init=False)
    refusal_sample: bool = False
    """Whether it was let through despite a refusal, to measure whether the refusal was right
    (DL-7): only its deadline stops it."""
    attempts: int = 0
    """Number of instances that did not finish it."""
    failed_on: frozenset[str] = frozenset()
    model: str = ""
    """The model's own name; empty until the model is known."""
    instance: str = ""
    listeners: list[L] = field(default_factory=list)
    on_end: list[Callable[[Self], None]] = field(default_factory=list)
    """Called after the listeners."""
    timer: Timer | None = None
    ending: Ending | None = None

    def __post_init__(self) -> None:
        self.deadline = self.job.deadline
        self.correlation_id = self.job.correlation_id
        self.marks = Marks(self.job.arrived)

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
