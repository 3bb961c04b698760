"""One offered slot: how far it got, what was said of it, and its one ending.

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
from orchestrator.slots.forecast import Wish
from orchestrator.slots.job import SlotJob
from orchestrator.telemetry.log import fields, service_log
from worker.protocol import AbortCause, Outcome

SLOT_BYTES = 8192
"""About what keeping a slot takes, with its events and its facts, but not its files."""


class SlotStage(IntEnum):
    """How far a slot got."""

    QUEUED = 0
    DISPATCHED = 1
    RUNNING = 2
    ENDED = 3


class Progress(NamedTuple):
    """One event. ``number`` is its id; ``image``: a JPEG of what there is, of a preview."""

    number: int
    stage: str
    percent: int
    image: bytes | None = None


@dataclass(frozen=True, slots=True)
class SlotEnding:
    """The one terminal record. ``error`` is None for a clip in time: ``met``, or ``partial`` where
    less was rendered than was asked for."""

    outcome: Outcome
    error: TidegateError | None = None
    cause: AbortCause | None = None


@dataclass(slots=True)
class SlotMarks:
    """When it got so far, in seconds of the clock; 0 while it has not."""

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
    """Its work on an instance."""

    def stop(self) -> None:
        """Nobody wants it any more."""


class Slot:
    """One offered slot."""

    def __init__(self, slot_id: str, job: SlotJob) -> None:
        self.id = slot_id
        self.job = job
        self.deadline = job.deadline
        self.stage = SlotStage.QUEUED
        self.marks = SlotMarks(job.arrived)
        self.wish = Wish(job.recipe, job.deadline.at, degrade=job.degrade)
        self.start_by = job.deadline.at
        """Its place among those that wait: later, and the least of it will hardly be in time."""
        self.drop_at = job.deadline.at
        """While it waits: later, and it is certain to be late."""
        self.refusal_sample = False
        """It would have been refused; nothing but its deadline stops it (DL-17)."""
        self.attempt: Stoppable | None = None
        self.attempts = 0
        """How often it was sent to an instance that did not finish it."""
        self.failed_on: frozenset[str] = frozenset()
        self.loss: TidegateError | None = None
        """Why the last instance did not finish it."""
        self.instance = ""
        self.timer: Timer | None = None
        self.percents: dict[str, int] = {}
        """What is done of each stage, at the instance that has it."""
        self.events: list[Progress] = []
        """For replay: no percent twice, and of each stage's previews the last."""
        self.facts: Mapping[str, object] = MappingProxyType({})
        """What the worker says of the clip, or of what there is of one."""
        self.files: dict[str, bytes] = {}
        """By ``OUTPUTS``' names."""
        self.ending: SlotEnding | None = None
        self.listeners: list[SlotListener] = []
        self.on_end: list[Callable[[Slot], None]] = []
        """Called after the listeners have heard of the end."""
        self._next_number = 1

    @property
    def kept_bytes(self) -> int:
        """About what keeping this takes in memory."""
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
        """Of what was said so far; 0 is ``queued``."""
        return self._next_number - 1

    @property
    def last_number(self) -> int | None:
        """Number of the terminal event; None while there is none."""
        return None if self.ending is None else self._next_number

    def listen(self, listener: SlotListener) -> None:
        """Hear everything from now on. A slot that has ended says nothing any more."""
        self.listeners = [*self.listeners, listener]

    def unlisten(self, listener: SlotListener) -> None:
        """Hear nothing more; fine for one that never listened."""
        self.listeners = [other for other in self.listeners if other is not listener]

    def dispatched(self, address: str, now: float) -> None:
        """It is on its way to an instance."""
        self.stage = SlotStage.DISPATCHED
        self.instance = address
        self.marks.dispatched = now
        self.percents = {}

    def requeued(self) -> None:
        """The instance did not finish it."""
        self.stage = SlotStage.QUEUED
        self.attempt = None
        self.instance = ""
        self.percents = {}
        self.facts, self.files = MappingProxyType({}), {}

    def progress(self, stage: str, percent: int, image: bytes | None, now: float) -> None:
        """The worker says how far it is, perhaps with a picture."""
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
        """The one end. Whoever ends a slot checks ``ending`` first."""
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
            except Exception:  # limits, stores and whoever ended the slot wait for the others
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
