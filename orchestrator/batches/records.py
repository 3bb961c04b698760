"""The records of files and batches on disk."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple

import msgspec

from orchestrator.clock import Boot, Clock


class Status(StrEnum):
    """Status of a batch, with OpenAI's names."""

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
    """A point in time on the wall clock and on the machine's own clock."""

    unix: float
    boot_id: str
    boot_s: float


@dataclass(frozen=True, slots=True)
class Time:
    """Ages of stamps: by the machine's own clock until it restarts, then by the wall clock."""

    clock: Clock
    boot: Boot

    def stamp(self) -> Stamp:
        return Stamp(self.clock.unix(), self.boot.id, self.boot.now())

    def age_s(self, stamp: Stamp) -> float:
        if self.boot.has(stamp.boot_id, stamp.boot_s):
            return self.boot.now() - stamp.boot_s
        return max(0.0, self.clock.unix() - stamp.unix)


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that clients can fetch."""

    id: str
    owner: str
    """Fingerprint of the file's key."""
    name: str
    purpose: str
    bytes: int
    made: Stamp
    keep_s: float
    """Seconds from the file's creation to its removal."""


class LineError(msgspec.Struct, frozen=True):
    """The reason that a batch did not start. ``line`` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class StoredBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. Its file ids are known from the start. Clients can fetch ``output_id`` and
    ``errors_id`` after the batch has ended if these files are not empty."""

    id: str
    owner: str
    input_id: str
    endpoint: str
    window: str
    """The client's window; ``window_s`` is the same in seconds."""
    window_s: float
    keep_s: float
    """Seconds from the batch's end to the removal of the batch and its results."""
    metadata: dict[str, str]
    made: Stamp
    output_id: str
    errors_id: str
    status: Status = Status.VALIDATING
    total: int = 0
    counts: dict[int, int] = {}
    errors: list[LineError] = []
    times: dict[str, int] = {}
    """Time of each status change, in Unix seconds."""
    over: Stamp | None = None

    def count(self, *kinds: LineOutcome) -> int:
        return sum(self.counts.get(kind, 0) for kind in kinds)


class BatchLine(NamedTuple):
    number: int
    """Number of the line among all lines of the file, from 1."""
    custom_id: str
    method: str
    url: str
    body: bytes


class LineResult(NamedTuple):
    """The result of one try to serve a line."""

    kind: LineOutcome
    status: int
    request_id: str
    body: bytes
    """Body of the response, as JSON."""
    retry_after_s: float | None = None
    """Seconds after which another try is useful; None: this result is final."""
    is_loss: bool = False
    """Whether an instance was lost during the line, possibly because of it."""
