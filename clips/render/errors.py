"""Errors that end a clip before it is done."""

from typing import ClassVar

from protocol import Code


class ClipError(Exception):
    """A clip was started but not finished. It ended in ``stage``. ``since`` is the time on
    ``time.monotonic`` at which the ``limit`` that stopped it was reached; None without a limit."""

    code: ClassVar[Code] = Code.ENGINE_ERROR
    limit: ClassVar[str] = "deadline"

    def __init__(self, stage: str, message: str, since: float | None = None) -> None:
        super().__init__(f"{stage}: {message}")
        self.stage = stage
        self.since = since


class StageFailed(ClipError):
    """A provider raised the exception in ``__cause__``."""


class StageTimeout(ClipError):
    """A stage took longer than its timeout."""

    code = Code.DEADLINE_EXCEEDED
    limit = "timeout"


class OutOfTime(ClipError):
    """The rest of the work takes longer than the deadline leaves."""

    code = Code.DEADLINE_EXCEEDED


class BehindPace(ClipError):
    """A stage would be late at its current pace, ``seconds_per_unit``; less may be in time."""

    code = Code.DEADLINE_EXCEEDED

    def __init__(self, stage: str, seconds_per_unit: float) -> None:
        super().__init__(stage, "would be late as it goes; less is rendered")
        self.seconds_per_unit = seconds_per_unit


class ClipCancelled(ClipError):
    """The clip was stopped from outside."""

    code = Code.CANCELLED
