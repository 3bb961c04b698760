"""What tasks and clips have in common: their progress, listeners, and one ending (DL-10).

Work goes back to the queue only when the instance that had it is lost or will not take it (OR-10)::

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
    """How far work got."""

    RECEIVED = 0
    QUEUED = 1
    DISPATCHED = 2
    RUNNING = 3
    ENDED = 4


@dataclass(slots=True)
class Marks:
    """When each stage began, in seconds of the clock; 0 while it has not."""

    received: float
    queued: float = 0.0
    dispatched: float = 0.0
    started: float = 0.0
    first_token: float = 0.0
    ended: float = 0.0

    @property
    def has_started(self) -> bool:
        """Whether the last worker has begun the work; an earlier worker's start is kept too."""
        return 0 < self.started >= self.dispatched


class Stated(Protocol):
    """A client's request, as far as it is the same for all work."""

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
    """A listener, as far as it is the same for all work."""

    def ended(self, work: Any, /) -> None:
        """The work has ended, and its ``ending`` is set; nothing follows."""


J = TypeVar("J", bound=Stated)
L = TypeVar("L", bound=Hearer)


class WorkItem(Generic[J, L]):
    """One offered piece of work, from its submission to its ending."""

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
        """Whether it would have been refused, and is let through to see whether that would have
        been right (DL-7): nothing but its deadline stops it."""
        self.attempts = 0
        """How often it was sent to an instance that did not finish it."""
        self.failed_on: frozenset[str] = frozenset()
        self.model = ""
        """The model's own name, once the model is known."""
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
        """Add a listener, which hears everything from now on. Work that has ended is silent."""
        self.listeners = [*self.listeners, listener]

    def unlisten(self, listener: L) -> None:
        """Remove a listener; no effect for one that never listened."""
        self.listeners = [other for other in self.listeners if other is not listener]

    def client_gone(self, *, too_slow: bool) -> bool:
        """Note that its client is gone; returns whether it is to end with that (WP-1)."""
        if self.ending is not None:
            return False
        told = TOO_SLOW if too_slow else DISCONNECTED
        narrate(service_log, told, self.served_name, **self.names())
        return self.job.on_disconnect is OnDisconnect.CANCEL

    def end(self, ending: Ending, now: float) -> None:
        """End the work, once only. Callers check ``ending`` first."""
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
            except Exception:  # limits, stores and callers wait for the others
                service_log.exception(
                    "a listener failed at the end of a %s", self.what, extra=fields(**self.names())
                )

    def _release(self, ending: Ending) -> None:
        """Drop what only living work needs, and stop what an instance still does of it."""


AnyWork = WorkItem[Any, Any]
