"""Types of the orchestrator's answers, events and lists. Times are milliseconds."""

import msgspec


class Usage(msgspec.Struct, frozen=True):
    """Numbers of prompt and completion tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Budget(msgspec.Struct, frozen=True):
    """Time spent in each part of a deadline; ``left_ms`` is negative if the task was late."""

    queue_ms: float = 0.0
    route_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    left_ms: float | None = None


class Submitted(msgspec.Struct, frozen=True):
    """Answer for an accepted task. ``predicted_start_ms`` counts from now."""

    task_id: str
    status: str
    events_url: str
    queue_position: int | None = None
    predicted_start_ms: float | None = None
    correlation_id: str = ""
    durable: bool = False
    """Whether the task survives a restart of the orchestrator."""
    loss_window_ms: float | None = None
    """A durable task may still be lost if the orchestrator dies this soon after its answer."""


class TaskError(msgspec.Struct, frozen=True):
    """Error of a failed task."""

    code: str
    message: str
    retryable: bool = False


class TaskStatus(msgspec.Struct, frozen=True):
    """A task's state: ``status`` is ``queued``, ``dispatched``, ``running`` or ``ended``.

    ``outcome`` and ``finish_reason`` are set once it has ended; ``text`` is the text so far.
    If the outcome is ``missed``, ``missed_part`` names the late part: ``first_token``,
    ``token_gap`` or ``whole``. ``calls_to_come`` is the number of further calls of its run, stated
    or expected, for which its share of the time leaves room; None without any.
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
    """Event: the task was accepted. ``queue_position`` counts the tasks before it."""

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
    """Event: the text is complete; the last event. ``missed_part`` as in ``TaskStatus``."""

    outcome: str
    finish_reason: str | None = None
    usage: Usage | None = None
    budget: Budget | None = None
    missed_part: str | None = None


class Failed(msgspec.Struct, frozen=True):
    """Event: the task failed; the last event. ``missed_part`` as in ``TaskStatus``."""

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
    """A complete answer. ``missed_part`` as in ``TaskStatus``."""

    text: str
    token_ids: tuple[int, ...]
    outcome: str
    finish_reason: str | None
    usage: Usage | None
    budget: Budget | None
    missed_part: str | None = None


class ModelInfo(msgspec.Struct, frozen=True):
    """A model that is served or can be loaded. ``max_model_len``: tokens of prompt and answer
    together, None if it is not loaded. ``state``: ``loaded``, ``loading``, ``loadable``."""

    id: str
    max_model_len: int | None = None
    created: float | None = None
    state: str = "loaded"
    bytes: int | None = None


class TaskLine(msgspec.Struct, frozen=True):
    """One task in a list, without its text.

    ``api`` is its route (``tasks``, ``chat``, ``messages``, ``slots`` …), and ``answer_id`` the id
    of its answer there (``chatcmpl-…``); either id cancels it. ``left_ms`` is the time left of its
    deadline, now or at its end; negative if it is late.
    """

    task_id: str
    status: str
    api: str = "tasks"
    answer_id: str = ""
    model: str = ""
    correlation_id: str = ""
    age_ms: float = 0.0
    took_ms: float = 0.0
    left_ms: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    outcome: str | None = None
    finish_reason: str | None = None
    code: str | None = None


class TaskList(msgspec.Struct, frozen=True):
    """Tasks, newest first; ``has_more``: there are older ones."""

    tasks: tuple[TaskLine, ...]
    has_more: bool = False


class InstanceSlot(msgspec.Struct, frozen=True):
    """An instance's slot model: its running clips, and the largest size and length of a clip."""

    state: str
    ready: bool = False
    reason: str | None = None
    slots_total: int = 0
    slots_free: int = 0
    running: int = 0
    max_size: int | None = None
    max_seconds: float | None = None


class Gate(msgspec.Struct, frozen=True):
    """One condition of an instance's readiness; ``reason`` says why it is not met."""

    open: bool
    reason: str = ""


class SwapState(msgspec.Struct, frozen=True):
    """Progress or result of a swap of an instance's model. At the end, ``phase`` is ``done`` or
    ``failed``. ``ms`` has the duration of each finished phase."""

    address: str
    model: str
    phase: str
    ms: dict[str, float] = {}
    total_ms: float = 0.0
    freed_mib: float = 0.0
    error: str | None = None


class InstancePrediction(msgspec.Struct, frozen=True):
    """Data behind the predictions for an instance: steps since its pace last changed, and finished
    jobs. 2 % of the jobs take more than ``spread`` times the usual time."""

    steps: int = 0
    jobs: int = 0
    spread: float = 0.0


class Instance(msgspec.Struct, frozen=True):
    """One Triton behind the service. A field is None until its worker has reported it."""

    address: str
    state: str
    ready: bool = False
    draining: bool = False
    reason: str | None = None
    breaker: str = ""
    load: int = 0
    jobs: int = 0
    model: str | None = None
    device: str | None = None
    context_tokens: int | None = None
    slots_total: int | None = None
    slots_free: int | None = None
    perf_tokens_per_s: float | None = None
    first_token_ms: float | None = None
    kv_blocks_free: int | None = None
    slot: InstanceSlot | None = None
    """Slot model of the instance; None if it renders no clips."""
    kind: str = "tidegate"
    """Kind of server: ``tidegate``, a Triton with Tidegate's worker; ``triton``, one with another
    backend; or ``vllm``, ``llamacpp``, ``tgi``."""
    lacks: tuple[str, ...] | None = None
    """Features that its engine does not have."""
    abort_ms: float | None = None
    """Maximum time that an aborted job holds its slot."""
    loadable: tuple[str, ...] = ()
    gates: dict[str, Gate] = {}
    swap: SwapState | None = None
    prediction: InstancePrediction | None = None
    """Data behind its predictions; unset until its steps have been measured."""


class InstanceList(msgspec.Struct, frozen=True):
    """Answer that lists all instances."""

    instances: tuple[Instance, ...]
    snapshot_version: int = 0


class ModelList(msgspec.Struct, frozen=True):
    """Answer that lists all models, in the shape of OpenAI's route."""

    data: tuple[ModelInfo, ...]
