"""One offered slot: its progress, its events, and its one ending.

It goes back to the queue only when the instance that had it is lost or will not take it::

    QUEUED ─▶ DISPATCHED ─▶ RUNNING ─▶ ENDED
      │ ▲────────┴────────────┘          ▲
      └──────────────────────────────────┘

Everything here runs on the event loop's thread and never waits.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from types import MappingProxyType
from typing import NamedTuple, Protocol

from orchestrator.clock import Timer
from orchestrator.errors import TidegateError
from orchestrator.slots.forecast import SlotNeeds
from orchestrator.slots.job import SlotJob
from orchestrator.telemetry.log import fields, service_log
from worker.protocol import AbortCause, Outcome

SLOT_BYTES = 8192
"""Bytes that keeping a slot takes, about, with its events and its facts, but not its files."""


class SlotStage(IntEnum):
    """How far a slot got."""

    QUEUED = 0
    DISPATCHED = 1
    RUNNING = 2
    ENDED = 3


class Progress(NamedTuple):
    """One progress event. ``number`` is its id; ``image``: a JPEG, for a preview."""

    number: int
    stage: str
    percent: int
    image: bytes | None = None


@dataclass(frozen=True, slots=True)
class SlotEnding:
    """A slot's one terminal record. ``error`` is None for a clip in time: ``met``, or ``partial``
    if less was rendered than was asked for."""

    outcome: Outcome
    error: TidegateError | None = None
    cause: AbortCause | None = None


@dataclass(slots=True)
class SlotMarks:
    """When a slot reached each stage, in seconds of the clock; 0 until then."""

    received: float
    dispatched: float = 0.0
    started: float = 0.0
    ended: float = 0.0


class SlotListener(Protocol):
    """Hears what happens to one slot, in order, synchronously. Must neither wait nor raise."""

    def progressed(self, event: Progress) -> None:
        """A stage got further, or there is a preview of it."""

    def ended(self, slot: "Slot") -> None:
        """``slot.ending`` is set; nothing follows."""


class Stoppable(Protocol):
    """A slot's work on an instance, which can be stopped."""

    def stop(self) -> None:
        """Stop the work: the slot is no longer wanted."""


class Slot:
    """One offered slot, from its submission to its ending."""

    def __init__(self, slot_id: str, job: SlotJob) -> None:
        self.id = slot_id
        self.job = job
        self.deadline = job.deadline
        self.stage = SlotStage.QUEUED
        self.marks = SlotMarks(job.arrived)
        self.wish = SlotNeeds(job.recipe, job.deadline.at, degrade=job.degrade)
        self.start_by = job.deadline.at
        """Start time after which its least plan will hardly be in time; orders waiting slots."""
        self.drop_at = job.deadline.at
        """Time after which a slot that still waits is certain to be late."""
        self.refusal_sample = False
        """Whether a refusal of the slot was not carried out; only its deadline stops it (DL-17)."""
        self.attempt: Stoppable | None = None
        self.attempts = 0
        """How often it was sent to an instance that did not finish it."""
        self.failed_on: frozenset[str] = frozenset()
        self.loss: TidegateError | None = None
        """Why the last instance did not finish it; None if none failed."""
        self.instance = ""
        self.timer: Timer | None = None
        self.percents: dict[str, int] = {}
        """Percent done by stage, at the instance that has the slot."""
        self.events: list[Progress] = []
        """Events for replay: no percent twice, and each stage's last preview."""
        self.facts: Mapping[str, object] = MappingProxyType({})
        """What the worker says of the clip, or of an unfinished one."""
        self.files: dict[str, bytes] = {}
        """Files by the names in ``OUTPUTS``."""
        self.ending: SlotEnding | None = None
        self.listeners: list[SlotListener] = []
        self.on_end: list[Callable[[Slot], None]] = []
        """Called after the listeners have heard of the end."""
        self._next_number = 1

    @property
    def kept_bytes(self) -> int:
        """Bytes that keeping this slot takes in memory, about."""
        previews = sum(len(event.image) for event in self.events if event.image is not None)
        return (
            SLOT_BYTES
            + 2 * len(self.job.recipe_json)
            + 128 * len(self.events)
            + previews
            + sum(map(len, self.files.values()))
        )

    @property
    def newest_number(self) -> int:
        """Number of the latest event; 0 is ``queued``."""
        return self._next_number - 1

    @property
    def last_number(self) -> int | None:
        """Number of the terminal event; None while there is none."""
        return None if self.ending is None else self._next_number

    def listen(self, listener: SlotListener) -> None:
        """Tell ``listener`` every event from now on; there are none once the slot has ended."""
        self.listeners = [*self.listeners, listener]

    def unlisten(self, listener: SlotListener) -> None:
        """Stop telling ``listener``; fine for one that never listened."""
        self.listeners = [other for other in self.listeners if other is not listener]

    def dispatched(self, address: str, now: float) -> None:
        """Note that the slot is on its way to an instance."""
        self.stage = SlotStage.DISPATCHED
        self.instance = address
        self.marks.dispatched = now
        self.percents = {}

    def requeued(self) -> None:
        """Put the slot back to the queue: its instance did not finish it."""
        self.stage = SlotStage.QUEUED
        self.attempt = None
        self.instance = ""
        self.percents = {}
        self.facts, self.files = MappingProxyType({}), {}

    def progress(self, stage: str, percent: int, image: bytes | None, now: float) -> None:
        """Record the worker's progress, perhaps with a preview."""
        if self.ending is not None:
            return
        if self.stage is SlotStage.DISPATCHED:
            self.stage = SlotStage.RUNNING
            self.marks.started = self.marks.started or now
        if self.percents.get(stage) != percent:
            self.percents[stage] = percent
            self._tell(Progress(self._number(), stage, percent))
        if image is not None:
            self.events = [e for e in self.events if e.image is None or e.stage != stage]
            self._tell(Progress(self._number(), stage, percent, image))

    def end(self, ending: SlotEnding, now: float) -> None:
        """End the slot. The caller must check ``ending`` first."""
        assert self.ending is None, f"slot {self.id} would end twice"
        self.ending = ending
        self.stage = SlotStage.ENDED
        self.marks.ended = now
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            attempt.stop()
        listeners, self.listeners = self.listeners, []
        for call in (*(listener.ended for listener in listeners), *self.on_end):
            try:
                call(self)
            except Exception:  # limits, stores and callers wait for the others
                service_log.exception(
                    "a listener failed at the end of a slot",
                    extra=fields(slot_id=self.id, correlation_id=self.job.correlation_id),
                )

    def _number(self) -> int:
        number = self._next_number
        self._next_number += 1
        return number

    def _tell(self, event: Progress) -> None:
        self.events.append(event)
        for listener in self.listeners:
            listener.progressed(event)
