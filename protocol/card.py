"""The model card: everything that an orchestrator needs to tokenize, admit and place requests."""

from enum import StrEnum

import msgspec

from protocol.sampling import Sampling, SamplingDefaults
from protocol.vision import Vision


class Feature(StrEnum):
    """A capability that requests and operators may need and some engines lack."""

    FINISH = "finish"
    """Can end a text at a sentence or a valid form as its deadline nears."""
    GRAMMAR = "grammar"
    IGNORE_EOS = "ignore_eos"
    IMAGES = "images"
    """Reads the images of a chat."""
    KV_EVENTS = "kv_events"
    """Reports which KV blocks it holds, so that prompts find their prefix."""
    LOGIT_BIAS = "logit_bias"
    LOGPROBS = "logprobs"
    MIN_P = "min_p"
    MIN_TOKENS = "min_tokens"
    PENALTIES = "penalties"
    PROMPT_LOGPROBS = "prompt_logprobs"
    SEED = "seed"
    SESSIONS = "sessions"
    """Keeps a conversation's KV between two turns."""
    SPECIAL_TEXT = "special_text"
    """Can leave special tokens in the text (``skip_special_tokens`` false)."""
    STATISTICS = "statistics"
    """Reports its load and speed in every report."""
    STEP_ABORT = "step_abort"
    """Ends an aborted job after the current step."""
    STOP_TOKEN_IDS = "stop_token_ids"
    TOKEN_IDS = "token_ids"
    """Takes prompts as token ids and answers with token ids."""


class Loadable(msgspec.Struct, frozen=True):
    """A model that a worker can load. ``bytes``: size of its files; ``load_ms``: its last load; 0
    if unknown."""

    name: str
    bytes: int
    load_ms: float = 0.0


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter, served next to its base model under its own name. ``digest`` covers its
    weights, hex SHA-256."""

    name: str
    digest: str


class StepCosts(msgspec.Struct, frozen=True):
    """Step times in ms, measured when the engine was loaded, without requests."""

    rows: tuple[int, ...]
    """Numbers of rows, ascending from 1 to the maximum of a step."""
    step_ms: tuple[float, ...]
    """Time of a step that decodes that many rows."""
    prompt_token_ms: float
    """Time that each prompt token adds to a step full of prompt tokens."""
    prompt_step_ms: float = 0.0
    """The fixed part of that, for any number of prompt tokens."""
    further_token_ms: float = 0.0
    """Time that each additional prompt token adds."""
    context_token_ms: float = 0.0
    """Time that each token of a row's context adds to a step, for each row; 0 if not measured."""
    doubt: float = 0.0
    """How much faster steps may be than measured, as a natural logarithm: 0 if the process had its
    cores during the measurement, 1.6 if it had a fifth of one."""

    def up_to(self, most: int) -> "StepCosts":
        """The costs of steps with at most ``most`` rows."""
        count = sum(rows <= most for rows in self.rows)
        return msgspec.structs.replace(self, rows=self.rows[:count], step_ms=self.step_ms[:count])


class ModelCard(msgspec.Struct, frozen=True):
    """A worker's facts about its model, sent in the first frame of a lane and on ``Describe``.

    ``tokenizer_json`` is the file of that name; ``chat_template`` is Jinja source, empty if the
    model has none. ``special_tokens`` maps the template's variables (``bos_token`` …) to text.
    ``engine_digest`` covers code and settings that change results, ``model_digest`` the weights,
    both hex SHA-256.
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
    """Maximum jobs in one step."""
    max_waiting: int
    """Jobs that the worker holds beyond ``max_running`` before it refuses more."""
    min_start_budget_ms: float
    """A generation with less time left than this at its start is refused (DL-3)."""
    max_step_tokens: int = 512
    """Token budget of one step, prompts and decodes together."""
    can_pause: bool = False
    """Whether the worker understands ``Pause`` and ``Resume``."""
    full_context_tokens: int = 0
    """The model's own context: more than ``context_tokens`` if the KV pool holds less."""
    sampling_defaults: SamplingDefaults = SamplingDefaults()
    """Sampling defaults for requests, from the model's ``generation_config.json``."""
    grammars: str = ""
    """Name and version of the grammar library; empty if a ``Submit`` must have no grammar."""
    can_continue: bool = False
    """Whether the worker can continue another worker's text, by ``Submit.begun_tokens``. Its draws
    then depend on seed and position alone."""
    lacks: tuple[Feature, ...] = ()
    """Features that the worker lacks, sorted; requests that need one go elsewhere or are
    refused."""
    abort_ms: float = 0.0
    """Maximum ms that an aborted job holds its slot beyond one step; admission accounts for it."""
    quantization: str = ""
    """How its weights are quantized, in the engine's own term (``int8``, ``q4_k_m``, ``awq``);
    ``none`` if they are not quantized, empty if unknown."""
    vram_bytes: int = 0
    """Total memory of its GPUs; 0 without a GPU or if unknown."""
    compute_capability: str = ""
    """Lowest CUDA compute capability of its GPUs, such as ``9.0``; empty without a GPU."""
    device_mask: int = 0
    """The GPUs in use: bit ``i`` is GPU ``i`` of its host; 0 without a GPU or if unknown."""
    serving: int = 0
    """Number of models that this process served before this one; ``Submit.serving`` repeats it."""
    loadable: tuple[Loadable, ...] = ()
    """Models that it can load on demand, by name alone (``Swap``)."""
    process_id: str = ""
    """Random per process: the same id after a lost lane shows that the process still lives."""
    vision: Vision | None = None
    """How the worker's model reads images; None if the model or its engine reads only text."""
    engine_reason: str = ""
    """Why this engine was chosen; empty if the worker's settings name it."""
    deterministic: bool = False
    """Whether equal prompts, parameters and seeds give equal tokens in any batch."""
    tensor_parallel: int = 1
    """Number of GPUs over which its weights are split."""
    adapters: tuple[Adapter, ...] = ()
    """LoRA adapters that it serves with the model; ``Submit.adapter`` names one."""
    step_costs: StepCosts | None = None
    """Its step times at load; None if they were not measured."""

    @property
    def all_lacks(self) -> tuple[Feature, ...]:
        """All features that the worker lacks, sorted, with ``images`` if it reads none."""
        blind = () if self.vision is not None else (Feature.IMAGES,)
        return tuple(sorted({*self.lacks, *blind}))

    @property
    def context_note(self) -> str:
        """A note for clients whose text exceeds the context because the KV pool is too small."""
        return context_note(self.context_tokens, self.full_context_tokens)


def context_note(context_tokens: int, full_context_tokens: int) -> str:
    """Text to append to an error; empty if the model's own context is not longer."""
    if full_context_tokens <= context_tokens:
        return ""
    return (
        f" (the model's own context is {full_context_tokens}, but the worker's KV pool holds"
        f" {context_tokens} tokens: its operator may raise TIDEGATE_WORKER__KV__BLOCKS)"
    )


def features_of(sampling: Sampling) -> list[Feature]:
    """Features that ``sampling`` needs: a worker that ``lacks`` one would answer differently.

    A seed needs no feature: an orchestrator may have added it so that another worker can continue
    the text.
    """
    has_penalties = (
        sampling.presence_penalty
        or sampling.frequency_penalty
        or sampling.repetition_penalty != 1.0
    )
    asked = {
        Feature.IGNORE_EOS: sampling.ignore_eos,
        Feature.LOGIT_BIAS: sampling.logit_bias,
        Feature.LOGPROBS: sampling.logprobs is not None,
        Feature.MIN_P: sampling.min_p,
        Feature.MIN_TOKENS: sampling.min_tokens,
        Feature.PENALTIES: has_penalties,
        Feature.PROMPT_LOGPROBS: sampling.prompt_logprobs is not None,
        Feature.SPECIAL_TEXT: not sampling.skip_special_tokens,
        Feature.STOP_TOKEN_IDS: sampling.stop_token_ids,
    }
    return [feature for feature, is_asked in asked.items() if is_asked]
