"""The records of a file and of a batch, as they are kept on the disk."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple

import msgspec

from orchestrator.clock import Boot, Clock


class Status(StrEnum):
    """Progress of a batch, in OpenAI's words."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"

    @property
    def is_over(self) -> bool:
        return self in (Status.COMPLETED, Status.FAILED, Status.EXPIRED, Status.CANCELLED)


class LineOutcome(IntEnum):
    """Outcome of a line. Stored as a number: never renumber."""

    SUCCEEDED = 1
    ERRORED = 2
    CANCELLED = 3
    EXPIRED = 4


class Stamp(msgspec.Struct, frozen=True):
    """A moment, on the wall clock and on the machine's own clock."""

    unix: float
    boot_id: str
    boot_s: float


@dataclass(frozen=True, slots=True)
class Time:
    """Ages of stamps. Until the machine restarts its own clock counts, then the wall clock."""

    clock: Clock
    boot: Boot

    def stamp(self) -> Stamp:
        return Stamp(self.clock.unix(), self.boot.id, self.boot.now())

    def age_s(self, stamp: Stamp) -> float:
        if self.boot.has(stamp.boot_id, stamp.boot_s):
            return self.boot.now() - stamp.boot_s
        return max(0.0, self.clock.unix() - stamp.unix)


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that clients can ask for."""

    id: str
    owner: str
    """Fingerprint of the key that the file belongs to."""
    name: str
    purpose: str
    bytes: int
    made: Stamp
    keep_s: float
    """Seconds after its making at which the file is removed."""


class LineError(msgspec.Struct, frozen=True):
    """Why a batch did not start; ``line`` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class StoredBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. The ids of its files are known from the start; ``output_id`` and ``errors_id`` can
    be asked for once the batch is over and these files are not empty."""

    id: str
    owner: str
    input_id: str
    endpoint: str
    window: str
    """Window as the client stated it; ``window_s`` in seconds."""
    window_s: float
    keep_s: float
    """Seconds after its end at which the batch and its results are removed."""
    metadata: dict[str, str]
    made: Stamp
    output_id: str
    errors_id: str
    status: Status = Status.VALIDATING
    total: int = 0
    counts: dict[int, int] = {}
    """Number of lines that are over, by ``LineOutcome``."""
    errors: list[LineError] = []
    times: dict[str, int] = {}
    """When the batch came to each status, in Unix seconds."""
    over: Stamp | None = None

    def count(self, *kinds: LineOutcome) -> int:
        return sum(self.counts.get(kind, 0) for kind in kinds)


class BatchLine(NamedTuple):
    """One request of a batch."""

    number: int
    """Number of the line, from 1, among all lines of the file."""
    custom_id: str
    method: str
    url: str
    body: bytes
    """Body of the request, as JSON."""


class LineResult(NamedTuple):
    """The result of a try to serve a line."""

    kind: LineOutcome
    status: int
    request_id: str
    body: bytes
    """Body of the answer, as JSON."""
    retry_after_s: float | None = None
    """Seconds after which another try makes sense; None: this is final."""
    is_loss: bool = False
    """Whether an instance was lost with the line, perhaps because of it."""
