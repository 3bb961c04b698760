"""The model card: everything an orchestrator must know to tokenise, admit and place."""

from enum import StrEnum

import msgspec

from worker.protocol.sampling import SamplingDefaults


class Pooling(StrEnum):
    """How a prompt's hidden states become its embedding."""

    MEAN = "mean"
    LAST = "last"


class Feature(StrEnum):
    """What requests and operators may expect of an engine, and some cannot do."""

    EMBEDDINGS = "embeddings"
    GRAMMAR = "grammar"
    IGNORE_EOS = "ignore_eos"
    KV_EVENTS = "kv_events"
    """It tells which KV blocks it holds, so that prompts find their prefix."""
    LOGIT_BIAS = "logit_bias"
    LOGPROBS = "logprobs"
    MIN_P = "min_p"
    MIN_TOKENS = "min_tokens"
    PENALTIES = "penalties"
    PROMPT_LOGPROBS = "prompt_logprobs"
    SEED = "seed"
    SESSIONS = "sessions"
    """It keeps a conversation's KV between two turns."""
    SPECIAL_TEXT = "special_text"
    """It can leave special tokens in the text (``skip_special_tokens`` false)."""
    STATISTICS = "statistics"
    """It tells how full it is and how fast, in every report."""
    STEP_ABORT = "step_abort"
    """A job that is given up is gone after the step under way."""
    STOP_TOKEN_IDS = "stop_token_ids"
    TOKEN_IDS = "token_ids"
    """It takes prompts as token ids, and answers with them."""


class Loadable(msgspec.Struct, frozen=True):
    """A model that a worker can be told to serve. ``bytes`` is what its files have, ``load_ms`` how
    long it took to load the last time; 0 where that is not known."""

    name: str
    bytes: int
    load_ms: float = 0.0


class ModelCard(msgspec.Struct, frozen=True):
    """Sent in the first frame of a lane, and again on ``Describe``.

    ``tokenizer_json`` is the file of that name; ``chat_template`` is Jinja source, empty when the
    model has none. ``special_tokens`` maps the template's variables (``bos_token`` …) to text.
    ``engine_digest`` covers code and settings that change results, ``model_digest`` the
    weights, both hex SHA-256.
    """

    model: str
    context_tokens: int
    vocab_size: int
    tokenizer_json: bytes
    chat_template: str
    special_tokens: dict[str, str]
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    block_tokens: int
    hash_salt: bytes
    engine: str
    engine_version: str
    engine_digest: str
    model_digest: str
    device: str
    max_running: int
    """Jobs that one step can carry."""
    max_waiting: int
    """Jobs that the worker holds beyond those, before it refuses."""
    min_start_budget_ms: float
    """Less budget than this at the start of a generation is refused (DL-3)."""
    max_step_tokens: int = 512
    """Token budget of one step, prompts and decodes together."""
    can_pause: bool = False
    """It understands ``Pause`` and ``Resume``."""
    full_context_tokens: int = 0
    """The model's own context: more than ``context_tokens`` where the KV pool holds less."""
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    """For requests that do not say; the worker has them from ``generation_config.json``."""
    pooling: Pooling | None = None
    """How it makes embeddings; None where it makes none."""
    grammars: str = ""
    """What enforces grammars there, name and version; empty where a ``Submit`` must have none."""
    can_continue: bool = False
    """It takes up any text where another worker left it, by ``Submit.begun_tokens``."""
    lacks: tuple[Feature, ...] = ()
    """What it cannot do, sorted. A request that needs one of these is placed elsewhere, or refused.
    """
    abort_ms: float = 0.0
    """How long a job that was given up may hold its slot beyond one step, as measured or as far as
    is known: admission reckons with it."""
    quantization: str = ""
    """How its weights are rounded, in the engine's word for it (``int8``, ``q4_k_m``, ``awq``);
    ``none`` where they are not, empty where nobody knows."""
    vram_bytes: int = 0
    """Memory of the GPUs that it has, together; 0 without one, or where nobody knows."""
    compute_capability: str = ""
    """CUDA's, of the least of its GPUs, such as ``9.0``; empty without one."""
    device_mask: int = 0
    """Bit ``i`` is GPU ``i`` of its host; 0 without one, or where nobody knows."""
    serving: int = 0
    """How many models this process had before this one: ``Submit.serving`` says it back."""
    loadable: tuple[Loadable, ...] = ()
    """What it can be told to serve instead, by name alone (``Swap``)."""
    process_id: str = ""
    """Random, made when the worker's process starts: who sees it again after a lane was lost knows
    that the process did not die. Empty where nobody knows."""

    @property
    def context_note(self) -> str:
        """What to say to whom the context is too short for, because the KV pool is."""
        return context_note(self.context_tokens, self.full_context_tokens)


def context_note(context_tokens: int, full_context_tokens: int) -> str:
    """To follow an error; empty where the model itself has no longer context."""
    if full_context_tokens <= context_tokens:
        return ""
    return (
        f" (the model's own context is {full_context_tokens}, but the worker's KV pool holds"
        f" {context_tokens} tokens: its operator may raise TIDEGATE_WORKER_KV_BLOCKS)"
    )
