"""Settings of a worker, read once from the environment (``TIDEGATE_WORKER_…``).

The launcher sets them for each Triton that it starts; a hand-started Triton takes them from its
own environment. A bad value stops the model from loading, with the variable's name.
"""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, SecretStr, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from worker.encoding import openable
from worker.engine_args import read_engine_args
from worker.environment import EnvironmentSettings, read_environment

EngineName = Literal[
    "torch", "vllm", "llamacpp", "transformers", "synthetic-free", "synthetic-paced"
]
DTypeName = Literal["auto", "float32", "bfloat16", "float16"]


LocalPath = Annotated[Path, AfterValidator(openable)]


class WorkerSettings(EnvironmentSettings):
    """One worker: which model, which engine, on what, how much."""

    model_config = SettingsConfigDict(env_prefix="TIDEGATE_WORKER_", frozen=True, extra="forbid")

    model_path: LocalPath
    """Checkpoint directory in Hugging Face layout."""
    model_name: str = ""
    """Name that clients use; when empty the directory's name, or ``org/name`` of a Hugging Face
    cache's snapshot."""
    generation_config: Literal["auto", "none"] = "auto"
    """``auto``: where a request does not say, ``temperature``, ``top_p``, ``top_k``, ``min_p``,
    ``repetition_penalty`` and ``max_new_tokens`` are those of the checkpoint's
    ``generation_config.json``, as in vLLM. ``none``: neutral ones (vLLM's ``--generation-config
    vllm``). End tokens come from it in any case."""
    pooling: Literal["auto", "mean", "last"] = "auto"
    """What an embedding is made of: the ``mean`` of a prompt's last hidden states, or the ``last``
    token's. ``auto``: as the checkpoint's ``1_Pooling/config.json`` says, else ``last``."""
    engine: EngineName = "torch"
    """``torch`` is our own; ``vllm``, ``llamacpp`` and ``transformers`` are others', each an
    optional extra (``worker.engines``). ``synthetic-…`` makes up tokens without a model: for
    benchmarks and tests only."""
    engine_args: Annotated[dict[str, str], NoDecode] = Field(default_factory=dict)
    """For an engine that others wrote: its own settings by its own names, as ``name=value`` pairs
    with blanks between them or as a JSON object. The engine checks names and values."""
    trust_remote_code: bool = False
    """Of ``transformers``: run the code that a checkpoint brings with it, with all the rights of
    this process."""
    synthetic_step_ms: float = Field(default=20.0, gt=0)
    """Of ``synthetic-paced``: what every step takes, ``synthetic_row_ms`` for each of its rows and
    ``synthetic_prompt_token_ms`` for each prompt token in it come on top."""
    synthetic_row_ms: float = Field(default=0.0, ge=0)
    synthetic_prompt_token_ms: float = Field(default=0.0, ge=0)
    synthetic_slow_file: LocalPath | None = None
    """While this file holds a number, ``synthetic-paced`` steps take that many times as long. With
    ``lost`` and the id of a worker's process, that process has lost its device."""
    synthetic_lengths: Literal["cap", "prompt"] = "cap"
    """Where a synthetic answer ends: at ``max_tokens``, or by itself, after as many tokens as the
    first two ids of its prompt say (``worker.runner.synthetic``)."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Never falls back: ``cpu`` must be asked for by name (WK-2)."""
    dtype: DTypeName = "auto"
    """``auto``: the checkpoint's own type on CUDA. On the CPU bfloat16 when that is the
    checkpoint's and the CPU has AMX, or the model is beyond the caches and the CPU has any
    instructions for it, else float32."""
    weights: Literal["packed", "onednn", "mapped"] = "packed"
    """On the CPU: copied into the order that computes fastest, or in any case into oneDNN's, or
    views of the files, without a copy and slower."""
    quantize: Literal["none", "int8"] = "none"
    """``int8``: weights rounded per output row, on the CPU; activations stay as they are."""
    cpu_threads: int = Field(default=0, ge=0)
    """Threads of a step on the CPU; 0 is one for a small model, else one per core, unless
    ``OMP_NUM_THREADS`` says otherwise."""
    deterministic: bool = False
    """The same prompt, parameters and seed give the same tokens in any company (WK-3); slower."""
    attention: Literal["auto", "reference", "numba", "triton", "varlen"] = "auto"
    """``auto``: the fastest that is right, measured at load; ``numba`` is for the CPU, ``triton``
    and ``varlen`` are for CUDA."""
    block_tokens: int = Field(default=16, ge=1)
    """Tokens in one KV block."""
    kv_blocks: int = Field(default=0, ge=0)
    """KV blocks in the pool; 0 is what ``max_running`` whole contexts can use, as far as memory
    goes: on CUDA 0.8 of what is free, on the CPU a quarter (for one context up to half)."""
    instances: int = Field(default=1, ge=1)
    """Workers that share this machine's memory, this one included: on the CPU each takes its part
    of what is free. The launcher sets it."""
    memory_soft_gib: float = Field(default=0.0, ge=0)
    """More than this is warned about, once; 0: never."""
    memory_hard_gib: float = Field(default=0.0, ge=0)
    """What weights, KV pool and steps together may take, of the GPU's memory or on the CPU of the
    process's own (WK-4): more stops the load, or costs the longest job; 0: whatever there is."""
    max_running: int = Field(default=64, ge=1)
    """Jobs that one step can carry."""
    max_waiting: int = Field(default=256, ge=0)
    """Jobs held beyond those before new ones are refused."""
    max_step_tokens: int = Field(default=512, ge=1)
    """Token budget of one step, prompts and decodes together."""
    max_stall_ms: float = Field(default=50.0, gt=0)
    """By how much prompts may lengthen a step that also carries decodes; on an engine whose steps
    take longer than this anyway, they may double one."""
    prefix_cache: bool = True
    """Keep the KV of full blocks after their job has ended, for prompts that begin alike."""
    session_kv_share: float = Field(default=0.5, ge=0, le=1)
    """So much of the pool at most is kept for conversations between two turns; 0: nothing. Running
    work gets the blocks all the same, when no others are left."""
    kv_disk_path: LocalPath | None = None
    """Directory in which the KV of conversations outlives memory and restarts; None for none."""
    kv_disk_bytes: int = Field(default=16 * 2**30, ge=0)
    """Most that it may hold for one model; in any case a fifth of the file system, 20 GiB at most,
    stays free."""
    overlap: bool = True
    """Launch a step before the one before it is read, where the runner can (CUDA)."""
    pause: bool = True
    """Jobs may be paused: they leave the batch and keep their KV until they are resumed."""
    min_start_budget_ms: float = Field(default=100.0, ge=0)
    """Less than this left at the start of a generation is refused (DL-3)."""
    default_deadline_ms: float = Field(default=300_000.0, gt=0)
    """For plain clients that state none."""
    models: dict[str, LocalPath] = Field(default_factory=dict)
    """Further models that this worker may be told to serve instead (a swap), by name: a JSON object
    of paths. An orchestrator loads them when they are asked for."""
    swap_beside: Literal["auto", "never"] = "auto"
    """``auto``: where memory allows, a model that is swapped in is loaded while the old one serves.
    ``never``: the old one is unloaded first."""
    legacy_stub: bool = False
    """Triton's Python stub was built for numpy 1 (the wheel's is); see ``worker.stub_abi``."""
    special_tokens_in_prompts: bool = True
    """What looks like a special token in a prompt of Triton's plain contract is one, as Triton's
    vLLM backend has it: its clients render chat templates themselves. False: it is text."""
    heartbeat_ms: float = Field(default=250.0, gt=0)
    """A lane with nothing to report gets an empty frame, a heartbeat, this often."""
    step_timeout_s: float = Field(default=60.0, ge=0)
    """A step of the engine that takes longer than this, and than 50 times what is usual, hangs: the
    process ends, so that its supervisor starts it anew. Ten times as long while no step has been
    measured. 0: it is waited for as long as it takes."""
    lane_token: SecretStr | None = None
    """Asked of whoever opens a lane or drains the worker; without one anybody who reaches Triton
    may. ``tidegate up`` makes one up at each start."""
    plain_token: SecretStr | None = None
    """Asked of every plain request, as its parameter ``token``; without one none is asked."""
    drain_hold_s: float = Field(default=30.0, gt=0)
    """A worker that was drained and is still there after this takes work again: whoever drained it
    did not mean to stop it, or cannot any more."""

    @property
    def computes_on_gpu(self) -> bool:
        """Synthetic engines compute nothing, whatever their device is said to be."""
        return self.device == "cuda" and not self.engine.startswith("synthetic")

    @field_validator("lane_token", "plain_token")
    @classmethod
    def _empty_is_none(cls, value: SecretStr | None) -> SecretStr | None:
        return value if value is not None and value.get_secret_value() else None

    @field_validator("engine_args", mode="before")
    @classmethod
    def _read_engine_args(cls, value: object) -> object:
        return read_engine_args(value) if isinstance(value, str) else value


def read_settings() -> WorkerSettings:
    """From the environment. Raises ``ValueError`` that names each variable which is wrong."""
    return read_environment(WorkerSettings, "the worker's settings")
