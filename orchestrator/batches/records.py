"""What is known of a file and of a batch, as it is kept on the disk."""

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple

import msgspec

from orchestrator.clock import Boot, Clock


class Status(StrEnum):
    """How far a batch got, in OpenAI's words."""

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


class Kind(IntEnum):
    """What came of a line. Stored as a number: never renumber."""

    SUCCEEDED = 1
    ERRORED = 2
    CANCELLED = 3
    EXPIRED = 4


class Stamp(msgspec.Struct, frozen=True):
    """A moment, on the wall's clock and on the machine's own."""

    unix: float
    boot_id: str
    boot_s: float


@dataclass(frozen=True, slots=True)
class Time:
    """Ages of stamps. While the machine has not started again its own clock counts, whatever the
    wall's is set to; after that the wall's does."""

    clock: Clock
    boot: Boot

    def stamp(self) -> Stamp:
        return Stamp(self.clock.unix(), self.boot.id, self.boot.now())

    def age_s(self, stamp: Stamp) -> float:
        if self.boot.has(stamp.boot_id, stamp.boot_s):
            return self.boot.now() - stamp.boot_s
        return max(0.0, self.clock.unix() - stamp.unix)


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that can be asked for."""

    id: str
    owner: str
    """Fingerprint of the key that it belongs to."""
    name: str
    purpose: str
    bytes: int
    made: Stamp
    keep_s: float
    """It is removed so long after it was made."""


class LineError(msgspec.Struct, frozen=True):
    """Why a batch was not begun; ``line`` counts from 1."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class StoredBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. The ids of its files are known from the start; ``output_id`` and ``errors_id`` can
    be asked for once it is over and they have something in them."""

    id: str
    owner: str
    dialect: str
    """Which API made it, and words its entries."""
    input_id: str
    endpoint: str
    window: str
    """As the client stated it; ``window_s`` in seconds."""
    window_s: float
    keep_s: float
    """It and its results are removed so long after its end."""
    metadata: dict[str, str]
    made: Stamp
    output_id: str
    errors_id: str
    status: Status = Status.VALIDATING
    total: int = 0
    counts: dict[int, int] = {}
    """Lines that are over, by ``Kind``."""
    errors: list[LineError] = []
    times: dict[str, int] = {}
    """When it came to each status, in Unix seconds."""
    over: Stamp | None = None

    def count(self, *kinds: Kind) -> int:
        return sum(self.counts.get(kind, 0) for kind in kinds)


class Line(NamedTuple):
    """One request of a batch."""

    number: int
    """From 1, of all lines of the file."""
    custom_id: str
    method: str
    url: str
    body: bytes
    """JSON."""


class Answer(NamedTuple):
    """What came of a try to serve a line."""

    kind: Kind
    status: int
    request_id: str
    body: bytes
    """JSON."""
    retry_after_s: float | None = None
    """It is worth another try after so long; None: this is final."""
    is_loss: bool = False
    """An instance was lost with it: perhaps by its own fault."""
