"""Settings of a worker, read once from the environment (``TIDEGATE_WORKER__…``).

The launcher sets them for each Triton that it starts; a manually started Triton reads them from its
own environment. If a value is invalid, the model does not load; the error names the variable.
"""

import json
import os
import shlex
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import AfterValidator, Field, PrivateAttr, SecretStr, field_validator
from pydantic_settings import NoDecode, SettingsConfigDict

from worker.encoding import openable
from worker.environment import (
    DELIMITER,
    EnvironmentSettings,
    Section,
    read_environment,
    variable_of,
)


def read_engine_args(text: str) -> dict[str, str]:
    """Parse ``name=value`` pairs separated by spaces (quoted as in a shell), or a JSON object.

    Names get underscores (``--max-num-seqs``); values stay text for the engine. Raises
    ``ValueError`` that names the problem.
    """
    text = text.strip()
    stated: list[tuple[str, object]] = []
    if text.startswith("{"):
        try:
            stated += json.loads(text).items()
        except ValueError as error:
            raise ValueError(f"starts with {{ but is not valid JSON: {error}") from None
    else:
        for word in shlex.split(text):
            name, equals, value = word.partition("=")
            if not equals or not name:
                raise ValueError(
                    "expected name=value pairs with blanks between them, or a JSON object:"
                    f" {word!r} is no pair"
                )
            stated.append((name, value))
    pairs: dict[str, str] = {}
    for name, one in stated:
        known = name.strip().removeprefix("--").replace("-", "_")
        if known in pairs:
            raise ValueError(f"{known} is given twice")
        pairs[known] = one if isinstance(one, str) else json.dumps(one)
    return pairs


PREFIX: Final = "TIDEGATE_WORKER__"
"""Prefix of every variable of a worker's settings."""
BLOCK_TOKENS: Final = 16
"""Tokens per KV block in our own engine and the synthetic engines; vLLM has its own number."""
SHARED_BY: Final = "TIDEGATE_SHARED_BY"
"""Variable in which a launcher sets how many workers share this machine's memory: on the CPU, each
uses its part."""
EngineName = Literal[
    "auto",
    "torch",
    "vllm",
    "synthetic-free",
    "synthetic-paced",
    "synthetic-scripted",
]
DTypeName = Literal["auto", "float32", "bfloat16", "float16"]


LocalPath = Annotated[Path, AfterValidator(openable)]


def _empty_is_none(token: SecretStr | None) -> SecretStr | None:
    return token if token is not None and token.get_secret_value() else None


Token = Annotated[SecretStr | None, AfterValidator(_empty_is_none)]
"""A secret; None if it is unset or empty."""


class KvSettings(Section):
    """The pool of KV blocks, and its disk tier."""

    blocks: int = Field(default=0, ge=0)
    """KV blocks in the pool; 0: ``max_running`` whole contexts, within free memory: on CUDA all but
    the largest step's and 3 %; on the CPU a quarter (up to half for one context)."""
    prefix_cache: bool = True
    """Whether full blocks' KV is kept after a job, for prompts with the same beginning."""
    disk_path: LocalPath | None = None
    """Directory that keeps the KV of conversations beyond memory and restarts; unset: none."""
    disk_bytes: int = Field(default=16 * 2**30, ge=0)
    """Maximum bytes in ``kv.disk_path`` for one model; a fifth of the file system, at most 20 GiB,
    always stays free."""


class MemorySettings(Section):
    """Limits on the worker's GPU memory or, on the CPU, its process memory (WK-4)."""

    hard_gib: float = Field(default=0.0, ge=0)
    """Maximum GiB for weights, KV pool and steps. Beyond it, the load stops or the longest job
    ends; at 96 % of it a warning is logged. 0: no limit."""


class PlainSettings(Section):
    """Requests of the plain contract, which Triton's own clients use."""

    token: Token = None
    """Token that every plain request must send as its parameter ``token``; unset: none."""


class WorkerSettings(EnvironmentSettings):
    """Settings of one worker: its model, engine, device and limits."""

    model_config = SettingsConfigDict(
        env_prefix=PREFIX, env_nested_delimiter=DELIMITER, frozen=True, extra="forbid"
    )

    model_path: LocalPath
    """Checkpoint directory in Hugging Face layout."""
    model_name: str = ""
    """Name that clients use; if empty, the directory's name, or ``org/name`` for a snapshot in a
    Hugging Face cache."""
    engine: EngineName = "auto"
    """``auto``: on CUDA, ``vllm`` if it is installed, supports the architecture, and no other
    setting needs ``torch``; otherwise ``torch``, Tidegate's own (docs/engines.md). ``synthetic-…``
    invents tokens for benchmarks and tests; ``synthetic-scripted`` gives the answers of a file
    (docs/clients.md)."""
    engine_args: Annotated[dict[str, str], NoDecode] = Field(default_factory=dict)
    """Settings of vLLM or llama.cpp's server, by its own names: ``name=value`` pairs or a JSON
    object. ``torch`` on the CPU has one (worker/README.md): ``team_steps=false``."""
    adapters: dict[str, LocalPath] = Field(default_factory=dict)
    """LoRA adapters by name, each served as a model: a JSON object of PEFT folders; ``vllm``
    only."""
    tensor_parallel: int = Field(default=1, ge=1)
    """Number of GPUs over which the weights are split, starting with the first one that the worker
    sees; ``vllm`` only. ``tidegate pool`` sets it for a group of GPUs."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Device to compute on. It never falls back: ``cpu`` must be requested by name (WK-2)."""
    dtype: DTypeName = "auto"
    """``auto``: on CUDA, the checkpoint's own dtype. On the CPU, bfloat16 if the checkpoint has it
    and our own products work (numba, AVX2 or more), or the model exceeds the caches and the CPU has
    bfloat16 instructions; otherwise float32."""
    deterministic: bool = False
    """Whether equal prompts, parameters and seeds give equal tokens in any batch (WK-3); slower."""
    max_running: int = Field(default=64, ge=1)
    """Maximum jobs in one step. If unset on CUDA: the fewest, up to 256, with at least 95 % of the
    most tokens per second, by the steps measured at load, and with room for 512 tokens each; with
    vLLM, its own number."""
    max_step_tokens: int = Field(default=512, ge=1)
    """Token budget of one step, prompts and decodes together. If unset on CUDA: the smallest of
    512, 1024, 2048 and 4096 with which the fixed cost is at most 15 % of a full step, else 4096."""
    overlap: bool = True
    """Whether to launch a step before the previous one is read, if the runner supports it (CUDA and
    ``synthetic-paced``)."""
    min_start_budget_ms: float = Field(default=100.0, ge=0, allow_inf_nan=False)
    """A generation with less time left than this at its start is refused (DL-3)."""
    choices_path: LocalPath | None = None
    """Directory that keeps the choice of the fastest products and attention, by machine and model;
    unset: they are measured at each start. ``tidegate up`` uses ``TIDEGATE_HOME/choices``."""
    models: dict[str, LocalPath] = Field(default_factory=dict)
    """Other models for swaps and loads on demand, by name: a JSON object of paths."""
    lane_token: Token = None
    """Token required to open a lane, or to drain or swap the worker; without it, every client of
    Triton may do so. ``tidegate up`` generates one at each start."""

    kv: KvSettings = KvSettings()
    memory: MemorySettings = MemorySettings()
    plain: PlainSettings = PlainSettings()

    _shared_by: int = PrivateAttr(default_factory=lambda: max(1, int(os.environ.get(SHARED_BY, 1))))

    @property
    def instances(self) -> int:
        """Number of workers that share this machine's memory, including this one."""
        return self._shared_by

    @property
    def computes_on_gpu(self) -> bool:
        """Whether the engine computes on a GPU; synthetic engines never do."""
        return self.device == "cuda" and not self.engine.startswith("synthetic")

    @property
    def team_steps(self) -> bool:
        """Whether ``torch`` on the CPU computes steps as jobs of its thread team."""
        return self.engine_args.get("team_steps", "").lower() not in ("false", "0")

    @field_validator("engine_args", mode="before")
    @classmethod
    def _read_engine_args(cls, value: object) -> object:
        return read_engine_args(value) if isinstance(value, str) else value


def variable(name: str) -> str:
    """The environment variable of a worker's setting with a dotted name."""
    return variable_of(PREFIX, name)


def read_settings() -> WorkerSettings:
    """Read the environment. Raises ``ValueError`` that names each wrong variable."""
    return read_environment(WorkerSettings, "the worker's settings")
