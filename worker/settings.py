"""Settings of a worker, read once from the environment (``TIDEGATE_WORKER__…``).

The launcher sets them for each Triton that it starts; a hand-started Triton takes them from its
own environment. A bad value stops the model from loading, with the variable's name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, SecretStr, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from worker.encoding import openable
from worker.engine_args import read_engine_args
from worker.environment import (
    DELIMITER,
    HIDDEN,
    EnvironmentSettings,
    Section,
    fixed_at,
    read_environment,
    variable_of,
)

PREFIX: Final = "TIDEGATE_WORKER__"
"""How every variable of a worker's settings begins."""
RENAMED: Final[Mapping[str, str]] = {
    "block_tokens": "kv.block_tokens",
    "kv_blocks": "kv.blocks",
    "prefix_cache": "kv.prefix_cache",
    "session_kv_share": "kv.session_share",
    "kv_disk_path": "kv.disk_path",
    "kv_disk_bytes": "kv.disk_bytes",
    "memory_hard_gib": "memory.hard_gib",
    "plain_token": "plain.token",
    "special_tokens_in_prompts": "plain.special_tokens",
    "default_deadline_ms": "plain.default_deadline_s",
    "synthetic_step_ms": "synthetic.step_ms",
    "synthetic_row_ms": "synthetic.row_ms",
    "synthetic_prompt_token_ms": "synthetic.prompt_token_ms",
    "synthetic_slow_file": "synthetic.slow_file",
    "synthetic_lengths": "synthetic.lengths",
    "max_stall_ms": fixed_at("50 ms"),
    "max_waiting": fixed_at("256"),
    "memory.soft_gib": fixed_at("96 % of memory.hard_gib"),
    "memory_soft_gib": fixed_at("96 % of memory.hard_gib"),
    "pause": "this setting is gone: TIDEGATE_DISPATCH__PAUSE, the orchestrator's, turns pauses off",
}
"""Names that settings had before, with those of today, or what became of those that are gone."""

EngineName = Literal[
    "auto",
    "torch",
    "vllm",
    "synthetic-free",
    "synthetic-paced",
    "synthetic-scripted",
]
GONE: Final[Mapping[str, str]] = {
    "llamacpp": "llama.cpp is a server now, which tidegate up --model FILE.gguf and tidegate pool"
    " start: there is none inside of a worker",
    "transformers": "this engine is gone: take vllm, or a server over HTTP (docs/engines.md)",
}
"""Engines that there were, and what to do instead."""
DTypeName = Literal["auto", "float32", "bfloat16", "float16"]


LocalPath = Annotated[Path, AfterValidator(openable)]


def _empty_is_none(token: SecretStr | None) -> SecretStr | None:
    return token if token is not None and token.get_secret_value() else None


Token = Annotated[SecretStr | None, AfterValidator(_empty_is_none)]
"""A secret; None where it is not set or empty."""


class KvSettings(Section):
    """The pool of KV blocks, and what is kept in it and on disk."""

    block_tokens: Annotated[int, HIDDEN] = Field(default=16, ge=1)
    """Tokens in one KV block."""
    blocks: int = Field(default=0, ge=0)
    """KV blocks in the pool; 0: what ``max_running`` whole contexts can use, within free memory: on
    CUDA all but what the largest step takes, measured at load, and a reserve of 3 %; on the CPU a
    quarter (for one context up to half)."""
    prefix_cache: Annotated[bool, HIDDEN] = True
    """Whether full blocks' KV is kept after their job, for prompts that begin alike."""
    session_share: float = Field(default=0.5, ge=0, le=1)
    """Largest share (0 to 1) of the pool kept for conversations between two turns; 0: nothing.
    Running work still gets these blocks when no others are left."""
    disk_path: LocalPath | None = None
    """Directory in which the KV of conversations outlives memory and restarts; unset: none."""
    disk_bytes: int = Field(default=16 * 2**30, ge=0)
    """Most bytes that ``kv.disk_path`` may hold for one model; in any case a fifth of the file
    system, 20 GiB at most, stays free."""


class MemorySettings(Section):
    """Limits of what the worker takes of the GPU's memory or, on the CPU, of the
    process's (WK-4)."""

    hard_gib: float = Field(default=0.0, ge=0)
    """Most GiB that weights, KV pool and steps together may take: more stops the load, or ends the
    longest job; from 96 % of it on one warning is logged. 0: no limit."""


class PlainSettings(Section):
    """Requests by the plain contract, that is those of Triton's own clients."""

    token: Token = None
    """Token required of every plain request, as its parameter ``token``; unset: none."""
    special_tokens: Annotated[bool, HIDDEN] = True
    """Whether text that looks like a special token in a plain request's prompt is one, as in
    Triton's vLLM backend, whose clients render chat templates themselves."""
    default_deadline_s: Annotated[float, HIDDEN] = Field(default=300.0, gt=0)
    """Deadline of plain requests that state none, in seconds from their arrival."""


class SyntheticSettings(Section):
    """Steps and answers of the engines that make up tokens."""

    step_ms: Annotated[float, HIDDEN] = Field(default=20.0, gt=0)
    """Time of every ``synthetic-paced`` step, to which ``synthetic.row_ms`` for each row and
    ``synthetic.prompt_token_ms`` for each prompt token are added."""
    row_ms: Annotated[float, HIDDEN] = Field(default=0.0, ge=0)
    prompt_token_ms: Annotated[float, HIDDEN] = Field(default=0.0, ge=0)
    prompt_step_ms: Annotated[float, HIDDEN] = Field(default=0.0, ge=0)
    """Time that a step with prompt tokens takes beyond these, however few they are, as on a GPU,
    where decodes alone are one recorded graph."""
    slow_file: Annotated[LocalPath | None, HIDDEN] = None
    """While this file holds a number, ``synthetic-paced`` steps take that many times as long. It
    may have a worker's device fail as well (``worker.runner.simulated_device``)."""
    lengths: Annotated[Literal["cap", "prompt"], HIDDEN] = "cap"
    """Length of a synthetic answer: ``cap`` is ``max_tokens``, ``prompt`` the number that the last
    two ids of its prompt encode (``worker.runner.synthetic``)."""


class WorkerSettings(EnvironmentSettings):
    """Settings of one worker: its model, engine, device and limits."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter=DELIMITER, frozen=True, extra="forbid"
    )

    model_path: LocalPath
    """Checkpoint directory in Hugging Face layout."""
    model_name: str = ""
    """Name that clients use; when empty the directory's name, or ``org/name`` of a Hugging Face
    cache's snapshot."""
    generation_config: Literal["auto", "none"] = "auto"
    """``auto``: where a request does not state them, ``temperature``, ``top_p``, ``top_k``,
    ``min_p``, ``repetition_penalty`` and ``max_new_tokens`` are those of the checkpoint's
    ``generation_config.json``, as in vLLM. ``none``: neutral ones (vLLM's ``--generation-config
    vllm``). End tokens come from that file in any case."""
    pooling: Annotated[Literal["auto", "mean", "last"], HIDDEN] = "auto"
    """How an embedding is made: by the ``mean`` of a prompt's last hidden states, or the ``last``
    token's. ``auto``: as the checkpoint's ``1_Pooling/config.json`` says, else ``last``."""
    engine: EngineName = "auto"
    """``auto``: on CUDA ``vllm``, where it is installed, has the model's architecture, and no other
    setting asks for what only Tidegate's own engine does; else ``torch``, which is Tidegate's own
    (docs/engines.md). ``synthetic-…`` makes up tokens without a model, for benchmarks and tests
    only; ``synthetic-scripted`` gives the answers of ``script``."""
    script: Annotated[LocalPath | None, HIDDEN] = None
    """TOML file with the answers of ``synthetic-scripted`` (docs/clients.md); unset: it calls and
    says what prompts tell it to."""
    engine_args: Annotated[dict[str, str], NoDecode] = Field(default_factory=dict)
    """Settings of vLLM, or of llama.cpp's server, by its own names, as ``name=value`` pairs with
    blanks between them or as a JSON object. It checks names and values itself."""
    adapters: dict[str, LocalPath] = Field(default_factory=dict)
    """LoRA adapters of the model, each served as a model of the name that it has here: a JSON
    object of folders as PEFT writes them; ``vllm`` only."""
    tensor_parallel: int = Field(default=1, ge=1)
    """GPUs over which the model's weights are split, the first ones that the worker sees; ``vllm``
    only. ``tidegate pool`` sets it where an instance has a group of GPUs."""
    trust_remote_code: bool = False
    """Whether ``vllm`` runs the code that comes with a checkpoint, with all the rights of this
    process."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Device to compute on. It never falls back: ``cpu`` must be asked for by name (WK-2)."""
    dtype: DTypeName = "auto"
    """``auto``: the checkpoint's own type on CUDA. On the CPU bfloat16 when that is the
    checkpoint's and our own products can be had (numba, a CPU with AVX-512 or AMX, weights that are
    not quantized), or the model is beyond the caches and the CPU has instructions for it; else
    float32."""
    weights: Annotated[Literal["packed", "onednn", "mapped"], HIDDEN] = "packed"
    """Weights on the CPU: copied into the order that computes fastest, measured at load
    (``packed``), always into oneDNN's (``onednn``), or views of the files, without a copy and
    slower (``mapped``)."""
    quantize: Literal["none", "int8"] = "none"
    """``int8``: weights rounded per output row, on the CPU; activations stay as they are."""
    cpu_threads: int = Field(default=0, ge=0)
    """Threads of a step on the CPU; 0: one for a small model, else one per core, unless
    ``OMP_NUM_THREADS`` is set."""
    deterministic: bool = False
    """Whether equal prompts, parameters and seeds give equal tokens in any batch (WK-3); slower."""
    attention: Annotated[Literal["auto", "reference", "numba", "triton", "flashinfer"], HIDDEN] = (
        "auto"
    )
    """Attention backend. ``auto``: the fastest that is exact enough, measured at load; ``numba`` is
    for the CPU, ``triton`` and ``flashinfer`` are for CUDA."""
    instances: Annotated[int, HIDDEN] = Field(default=1, ge=1)
    """Workers that share this machine's memory, this one included: on the CPU each takes its part
    of what is free. The launcher sets it."""
    max_running: int = Field(default=64, ge=1)
    """Most jobs that one step can carry."""
    max_step_tokens: int = Field(default=512, ge=1)
    """Token budget of one step, prompts and decodes together."""
    overlap: Annotated[bool, HIDDEN] = True
    """Whether to launch a step before the previous one is read, where the runner can (CUDA)."""
    image_bytes: Annotated[int, HIDDEN] = Field(default=32 * 2**20, ge=0)
    """Most bytes of a prompt's images together, as files, where model and engine read images. 0: it
    reads text only."""
    min_start_budget_ms: Annotated[float, HIDDEN] = Field(default=100.0, ge=0)
    """A generation that has less time than this left at its start is refused (DL-3)."""
    models: dict[str, LocalPath] = Field(default_factory=dict)
    """Further models that this worker may be told to serve instead (a swap), by name: a JSON object
    of paths. An orchestrator loads them when they are asked for."""
    swap_beside: Annotated[Literal["auto", "never"], HIDDEN] = "auto"
    """``auto``: where memory allows, a new model is loaded while the old one serves (a swap).
    ``never``: the old one is unloaded first."""
    legacy_stub: Annotated[bool, HIDDEN] = False
    """Whether Triton's stub was built for numpy 1 (the wheel's is; ``worker.service.stub_abi``)."""
    heartbeat_ms: Annotated[float, HIDDEN] = Field(default=250.0, gt=0)
    """A lane with nothing to report gets an empty frame, a heartbeat, this often."""
    step_timeout_s: Annotated[float, HIDDEN] = Field(default=60.0, ge=0)
    """A step of the engine that takes longer than this, and than 50 times the usual, counts as
    hung: the process ends, so that its supervisor starts it anew. While no step has been measured,
    the limit is ten times as long. 0: never."""
    lane_token: Token = None
    """Token required to open a lane, or to drain or swap the worker; without one anybody who
    reaches Triton may. ``tidegate up`` makes one up at each start."""
    drain_hold_s: Annotated[float, HIDDEN] = Field(default=30.0, gt=0)
    """A worker that was drained, and is not stopped within this time, accepts work again: whoever
    drained it did not mean to stop it, or cannot any more."""

    kv: KvSettings = KvSettings()
    memory: MemorySettings = MemorySettings()
    plain: PlainSettings = PlainSettings()
    synthetic: SyntheticSettings = SyntheticSettings()

    @property
    def computes_on_gpu(self) -> bool:
        """Whether the engine computes on a GPU, which synthetic engines never do."""
        return self.device == "cuda" and not self.engine.startswith("synthetic")

    @field_validator("engine", mode="before")
    @classmethod
    def _is_there(cls, value: object) -> object:
        if isinstance(value, str) and value in GONE:
            raise ValueError(GONE[value])
        return value

    @field_validator("engine_args", mode="before")
    @classmethod
    def _read_engine_args(cls, value: object) -> object:
        return read_engine_args(value) if isinstance(value, str) else value


def variable(name: str) -> str:
    """The environment variable of a worker's setting, which is named with dots."""
    return variable_of(PREFIX, name)


def read_settings() -> WorkerSettings:
    """Read the environment. Raises ``ValueError`` that names each variable which is wrong."""
    return read_environment(WorkerSettings, "the worker's settings", RENAMED)
