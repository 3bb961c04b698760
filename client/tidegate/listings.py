"""What a service tells about itself, as types. Times are milliseconds."""

import msgspec


class ModelInfo(msgspec.Struct, frozen=True):
    """A model that is served, or would be. ``max_model_len``: tokens of prompt and answer together,
    None where it is not loaded. ``state``: ``loaded``, ``loading``, ``loadable``."""

    id: str
    max_model_len: int | None = None
    created: float | None = None
    state: str = "loaded"
    bytes: int | None = None


class TaskLine(msgspec.Struct, frozen=True):
    """One task in a list: how it stands, without its text.

    ``api`` is the route that it came by (``tasks``, ``chat``, ``messages``, ``slots`` …), and
    ``answer_id`` what its answer is called there (``chatcmpl-…``); cancelled by either.
    ``left_ms`` is what was left of its deadline at its end, or is now; negative when it is late.
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
    """Tasks, newest first; ``has_more``: older ones were left out."""

    tasks: tuple[TaskLine, ...]
    has_more: bool = False


class InstanceSlot(msgspec.Struct, frozen=True):
    """An instance's slot model: its clips under way, and what they may be at most."""

    state: str
    ready: bool = False
    reason: str | None = None
    slots_total: int = 0
    slots_free: int = 0
    running: int = 0
    max_size: int | None = None
    max_seconds: float | None = None


class Gate(msgspec.Struct, frozen=True):
    """A part of an instance's readiness; ``reason`` says why it is not open."""

    open: bool
    reason: str = ""


class SwapState(msgspec.Struct, frozen=True):
    """How a swap of an instance's model goes, or went: ``phase`` is ``done`` or ``failed`` at its
    end, and ``ms`` what each phase took that is over. ``beside``: the new model was loaded while
    the old one served."""

    address: str
    model: str
    phase: str
    ms: dict[str, float] = {}
    total_ms: float = 0.0
    beside: bool = False
    freed_mib: float = 0.0
    error: str | None = None


class Instance(msgspec.Struct, frozen=True):
    """One Triton behind the service. None: its worker has not told yet."""

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
    """None: it renders no clips."""
    kind: str = "tidegate"
    """``tidegate``: a Triton with Tidegate's worker; ``triton``: one with another backend;
    ``vllm``, ``llamacpp``, ``tgi``: those servers."""
    lacks: tuple[str, ...] | None = None
    """What its engine cannot do."""
    abort_ms: float | None = None
    """How long a job that was given up may hold its slot."""
    loadable: tuple[str, ...] = ()
    gates: dict[str, Gate] = {}
    swap: SwapState | None = None


class InstanceList(msgspec.Struct, frozen=True):
    """All of them."""

    instances: tuple[Instance, ...]
    snapshot_version: int = 0


class ModelList(msgspec.Struct, frozen=True):
    """As OpenAI's route has it."""

    data: tuple[ModelInfo, ...]
