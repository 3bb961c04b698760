"""One submitted clip: the client's request, its progress, its events, and its end.

All code here runs on the event loop's thread and never blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple, Protocol

from clips.dispatch.forecast import ClipNeeds
from clips.plan.recipe import Recipe
from orchestrator.errors import (
    DeadlineExceeded,
    Draining,
    EngineError,
    InstanceLost,
    InvalidRequest,
    NoCapacity,
    TidegateError,
)
from orchestrator.tasks.ending import Ending
from orchestrator.tasks.job import OnDisconnect, Stated
from orchestrator.tasks.verdicts import failed, refused
from orchestrator.tasks.work import Stage, WorkItem
from protocol import Code, FinishReason, Outcome

if TYPE_CHECKING:
    from clips.dispatch.attempt import ClipAttempt

MODEL: Final = "slot"
"""Triton's name of the model."""


class OutputKind(NamedTuple):
    file: str
    content_type: str


OUTPUTS: Final[Mapping[str, OutputKind]] = {
    "mp4": OutputKind("clip.mp4", "video/mp4"),
    "wav": OutputKind("speech.wav", "audio/wav"),
    "png": OutputKind("portrait.png", "image/png"),
}
"""Kinds of output files by the name of the model's output tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipJob(Stated):
    """A submitted clip. ``recipe_json`` is unchanged: a newer worker may know more fields."""

    recipe: Recipe
    recipe_json: bytes
    outputs: tuple[str, ...] = ("mp4",)
    degrade: bool = False
    """Whether parts may be dropped to be in time."""
    on_disconnect: OnDisconnect = OnDisconnect.CONTINUE


CLIP_BYTES = 8192
"""Approximate bytes of a stored clip with its events and facts, without its files."""


class StageProgress(NamedTuple):
    """One progress event. ``number`` is its id."""

    number: int
    stage: str
    percent: int


class ClipListener(Protocol):
    """Receives one clip's events, in order, synchronously. Must neither block nor raise."""

    def progressed(self, event: StageProgress) -> None:
        """A stage has made progress."""

    def ended(self, clip: "ClipTask") -> None:
        """``clip.ending`` is set; this is the last call."""


class ClipTask(WorkItem[ClipJob, ClipListener]):
    """One submitted clip, from its submission to its end."""

    what: ClassVar[str] = "slot"

    def __init__(self, clip_id: str, job: ClipJob) -> None:
        super().__init__(clip_id, job)
        self.model = MODEL
        self.stage = Stage.QUEUED
        self.needs = ClipNeeds(job.recipe, job.deadline.at, degrade=job.degrade)
        self.drop_at = job.deadline.at
        """Time after which it leaves the queue, because it is certain to be late."""
        self.start_by = job.deadline.at
        """Latest start time at which its minimum plan can be in time; orders waiting clips."""
        self.attempt: ClipAttempt | None = None
        self.loss: TidegateError | None = None
        """Why the last instance did not finish it; None if no instance failed."""
        self.percents: dict[str, int] = {}
        """Percent done by stage, at the instance that has the clip."""
        self.events: list[StageProgress] = []
        """Events for replay, numbered from 1: no percent twice."""
        self.facts: Mapping[str, object] = MappingProxyType({})
        """The worker's facts about the clip, finished or not."""
        self.files: dict[str, bytes] = {}
        """Files by the names in ``OUTPUTS``."""

    @property
    def kept_bytes(self) -> int:
        return (
            CLIP_BYTES
            + 2 * len(self.job.recipe_json)
            + 128 * len(self.events)
            + sum(map(len, self.files.values()))
        )

    @property
    def last_number(self) -> int | None:
        """Number of the terminal event; None before it."""
        return None if self.ending is None else len(self.events) + 1

    def dispatched(self, address: str, now: float) -> None:
        self.stage = Stage.DISPATCHED
        self.instance = address
        self.marks.dispatched = now
        self.percents = {}

    def requeued(self) -> None:
        """Return the clip to the queue, because its instance did not finish it."""
        self.stage = Stage.QUEUED
        self.attempt = None
        self.instance = ""
        self.percents = {}
        self.facts, self.files = MappingProxyType({}), {}

    def progress(self, stage: str, percent: int, now: float) -> None:
        if self.ending is not None:
            return
        if self.stage is Stage.DISPATCHED:
            self.stage = Stage.RUNNING
            self.marks.started = self.marks.started or now
        if self.percents.get(stage) != percent:
            self.percents[stage] = percent
            event = StageProgress(len(self.events) + 1, stage, percent)
            self.events.append(event)
            for listener in self.listeners:
                listener.progressed(event)

    def _release(self, ending: Ending) -> None:
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            attempt.stop()


TO_BE_SENT_AGAIN = (Code.NO_CAPACITY, Code.DRAINING, Code.CANCELLED, Code.INSTANCE_LOST)
"""Codes after which a clip is sent again: it is valid, and we did not cancel it."""


def rendered(clip: ClipTask, now: float) -> Ending:
    """The ending of a rendered clip; ``partial`` if it is less than requested."""
    if clip.deadline.left_ms(now) < 0:
        return overdue(clip, now)
    outcome = Outcome.PARTIAL if clip.facts.get("given_up") else Outcome.MET
    return Ending(outcome, FinishReason.STOP)


def overdue(clip: ClipTask, now: float) -> Ending:
    """The ending of a clip whose deadline is past."""
    late_ms = max(0.0, -clip.deadline.left_ms(now))
    where = "in " + next(reversed(clip.percents), "the worker's queue")
    if clip.stage is Stage.QUEUED:
        where = "before it began"
        if clip.loss is not None:
            where = "while it waited for another instance after its own was lost"
    error = DeadlineExceeded(f"the deadline passed {where}", exceeded_by_ms=late_ms)
    return Ending(Outcome.MISSED, FinishReason.DEADLINE, error)


def code_of(words: str) -> tuple[Code | None, str]:
    """Split a worker's error, ``code: message``; the code is None for Triton's own errors."""
    head, colon, rest = words.partition(": ")
    try:
        return (Code(head), rest) if colon else (None, words)
    except ValueError:
        return None, words


def judged(clip: ClipTask, code: Code | None, message: str, now: float) -> Ending:
    """The ending for a worker's error, if the clip is not sent again."""
    match code:
        case Code.INVALID_REQUEST:
            field = message.partition(": ")[0]
            is_field = field.startswith("recipe")
            return refused(InvalidRequest(message, field=field if is_field else None))
        case Code.DEADLINE_EXCEEDED:
            if clip.deadline.left_ms(now) < 0:
                return overdue(clip, now)
            error = DeadlineExceeded(message)
            if not clip.marks.started:
                return refused(error)
            return Ending(Outcome.MISSED, FinishReason.DEADLINE, error)
        case Code.NO_CAPACITY:
            return refused(NoCapacity(message))
        case Code.DRAINING:
            return failed(Draining(message))
        case Code.CANCELLED | Code.INSTANCE_LOST | None:
            return failed(InstanceLost(f"the instance could not continue this: {message}"))
        case _:
            return failed(EngineError(message))
