"""Arguments of ``tidegate up``, ``tidegate worker`` and ``tidegate slot``, as given."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Arguments of ``tidegate up`` and ``tidegate worker``, named as on the command line; times are
    seconds. ``serve``: with an orchestrator."""

    model: Path | None
    model_name: str | None
    device: str | None
    engine: str | None
    instances: int
    gpus: tuple[str, ...]
    tensor_parallel: int | None
    slot: bool
    no_llm: bool
    triton: Path | None
    triton_host: str
    triton_open: bool
    http_port: int
    grpc_port: int
    metrics_port: int
    load_timeout: float
    drain: float
    log_to_stderr: bool
    state_file: Path | None
    follow_parent: bool
    host: str = "127.0.0.1"
    port: int = 0
    processes: int = 1
    serve: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipOptions:
    """Arguments of ``tidegate slot``; None leaves a thing to the recipe and the service."""

    text: str | None
    recipe: Path | None
    out: tuple[Path, ...]
    portrait: str | None
    seed: int | None
    voice: str | None
    size: int | None
    seconds: float | None
    deadline: float | None
    on_deadline: Literal["error", "degrade"] | None
    preview: Path | None
    as_json: bool
