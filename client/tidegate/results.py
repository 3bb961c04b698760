"""Types of the orchestrator's answers and events. Times are milliseconds."""

import msgspec


class Usage(msgspec.Struct, frozen=True):
    """Numbers of tokens read and written."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Budget(msgspec.Struct, frozen=True):
    """Time spent in each part of a deadline; ``left_ms`` is negative when it was overrun."""

    queue_ms: float = 0.0
    route_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    left_ms: float | None = None


class Submitted(msgspec.Struct, frozen=True):
    """Answer to a task that was accepted. ``predicted_start_ms`` counts from now."""

    task_id: str
    status: str
    events_url: str
    queue_position: int | None = None
    predicted_start_ms: float | None = None
    correlation_id: str = ""
    durable: bool = False
    """Whether the task outlives the orchestrator."""
    loss_window_ms: float | None = None
    """A durable task may still be lost if the orchestrator dies this soon after its answer."""


class TaskError(msgspec.Struct, frozen=True):
    """Error of a task that ended badly."""

    code: str
    message: str
    retryable: bool = False


class TaskStatus(msgspec.Struct, frozen=True):
    """A task's state: ``status`` is ``queued``, ``dispatched``, ``running`` or ``ended``.

    ``outcome`` and ``finish_reason`` are set once it has ended; ``text`` is the text so far.
    ``missed_part`` is what was late if the outcome is ``missed``: ``first_token``, ``token_gap`` or
    ``whole``. ``calls_to_come`` is the number of further calls of its run, stated or expected, that
    its share of the time allows for; None without any.
    """

    task_id: str
    status: str
    outcome: str | None = None
    finish_reason: str | None = None
    text: str = ""
    usage: Usage | None = None
    error: TaskError | None = None
    budget: Budget | None = None
    missed_part: str | None = None
    calls_to_come: float | None = None

    @property
    def ended(self) -> bool:
        return self.status == "ended"


class Queued(msgspec.Struct, frozen=True):
    """Event: the task was taken on. ``queue_position`` counts the tasks before it."""

    task_id: str = ""
    queue_position: int | None = None


class Started(msgspec.Struct, frozen=True):
    """Event: the task runs on a worker."""


class Token(msgspec.Struct, frozen=True):
    """Event: one step's new tokens. ``text`` may be empty while a character is incomplete.

    ``index`` is the position of the first of ``token_ids`` in the completion.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    index: int = 0


class End(msgspec.Struct, frozen=True):
    """Event: the text is complete. Nothing follows. ``missed_part`` as in ``TaskStatus``."""

    outcome: str
    finish_reason: str | None = None
    usage: Usage | None = None
    budget: Budget | None = None
    missed_part: str | None = None


class Failed(msgspec.Struct, frozen=True):
    """Event: the task ended badly. Nothing follows. ``missed_part`` as in ``TaskStatus``."""

    code: str
    message: str
    retryable: bool = False
    outcome: str = ""
    finish_reason: str | None = None
    usage: Usage | None = None
    budget: Budget | None = None
    missed_part: str | None = None


Event = Queued | Started | Token | End | Failed

EVENT_TYPES: dict[str, type[Event]] = {
    "queued": Queued,
    "started": Started,
    "token": Token,
    "end": End,
    "error": Failed,
}
"""Type of each event, by its name on the wire. A client ignores names that it does not know."""


class Generation(msgspec.Struct, frozen=True):
    """A whole answer. ``missed_part`` as in ``TaskStatus``."""

    text: str
    token_ids: tuple[int, ...]
    outcome: str
    finish_reason: str | None
    usage: Usage | None
    budget: Budget | None
    missed_part: str | None = None
