"""What ends a slot before it is done."""

from typing import ClassVar

from worker.errors import RequestError
from worker.protocol import Code


class RecipeError(RequestError):
    """A recipe that cannot be rendered; ``field`` is where, in dots, the message says what."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"recipe.{field}: {message}" if field else f"recipe: {message}")
        self.field = field


class SlotError(Exception):
    """A slot that was begun and is not finished. ``stage`` is the one that it ended in, ``since``
    when on ``time.monotonic`` it should have ended, where a limit stopped it."""

    code: ClassVar[Code] = Code.ENGINE_ERROR

    def __init__(self, stage: str, message: str, since: float | None = None) -> None:
        super().__init__(f"{stage}: {message}")
        self.stage = stage
        self.since = since


class StageFailed(SlotError):
    """A provider raised; ``__cause__`` is what."""


class StageTimeout(SlotError):
    """A stage took longer than its timeout."""

    code = Code.DEADLINE_EXCEEDED


class OutOfTime(SlotError):
    """What is left of the deadline is less than what the rest takes."""

    code = Code.DEADLINE_EXCEEDED


class BehindPace(SlotError):
    """A stage that would be late as it goes, where less would not be. ``seconds_per_unit``: how it
    goes."""

    code = Code.DEADLINE_EXCEEDED

    def __init__(self, stage: str, seconds_per_unit: float) -> None:
        super().__init__(stage, "would be late as it goes; less is rendered")
        self.seconds_per_unit = seconds_per_unit


class SlotCancelled(SlotError):
    """Somebody outside wants it to stop."""

    code = Code.CANCELLED
