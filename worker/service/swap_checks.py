"""Checks before a swap that the model exists, is complete and is not too large."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from pydantic import ValidationError

from protocol import Loadable
from worker.engine_choice import chosen
from worker.environment import problem_of
from worker.errors import BrokenCheckpoint, EngineMissing, InvalidCall, MemoryLimitExceeded
from worker.memory import GIB
from worker.models.config import ModelConfig, read_config
from worker.models.folder import model_name, why_unservable
from worker.runner.memory import CudaMemory, MemoryMeter, ProcessMemory, block_bytes
from worker.settings import BLOCK_TOKENS, WorkerSettings

_OF_THE_PROCESS = frozenset({"adapters", "lane_token", "models", "plain.token"})
"""Settings of the process; a swap cannot change them."""
_LOADING_SHARE = 1.25
"""Peak memory of a load relative to the final weights, which are packed layer by layer. The excess
is free again before the KV pool is allocated."""


def name_of(settings: WorkerSettings) -> str:
    """Name that clients use for the model."""
    return settings.model_name or model_name(settings.model_path)


def target_settings(started: WorkerSettings, asked: Mapping[str, str]) -> WorkerSettings:
    """The settings that the worker ``started`` with, overridden by the ``asked`` settings, whose
    names have dots.

    Raises ``InvalidCall`` for an unknown setting, an invalid value or an unknown model.
    """
    changes: dict[str, object] = {name.lower(): value for name, value in asked.items()}
    for name in changes:
        is_own = name in _OF_THE_PROCESS
        problem = is_own and "it is the process's own"
        if problem := problem or problem_of(name, WorkerSettings, "a worker setting"):
            raise InvalidCall(f"a swap cannot set {name[:64]}: {problem}")
    known, model = known_models(started), str(changes.get("model_name", ""))
    if "model_path" in changes:
        changes.setdefault("model_name", "")
    elif not model:
        raise InvalidCall("a swap names its model: model_path, or model_name for one that is known")
    elif model not in known:
        raise InvalidCall(
            f"this worker knows no model {model[:128]!r}; it knows {', '.join(sorted(known))}:"
            " state model_path, or name it in TIDEGATE_WORKER__MODELS"
        )
    else:
        changes["model_path"] = known[model]
    values = started.model_dump()
    if Path(str(changes["model_path"])) != started.model_path:
        values["adapters"] = {}  # they belong to the model that the worker started with
    for name, value in changes.items():
        section, _, own = name.rpartition(".")
        (values[section] if section else values)[own] = value
    try:
        return WorkerSettings(**values)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise InvalidCall(f"these settings do not fit: {wrong}") from None


def known_models(started: WorkerSettings) -> dict[str, Path]:
    """Paths by name: the model that the worker started with, and the models in its settings."""
    return {name_of(started): started.model_path} | dict(started.models)


def loadable(started: WorkerSettings, load_ms: Mapping[str, float]) -> tuple[Loadable, ...]:
    """The card's models, from the settings. ``load_ms``: measured load times by name."""
    if not started.models:
        return ()
    return tuple(
        Loadable(name, file_bytes(path), round(load_ms.get(name, 0.0), 1))
        for name, path in sorted(known_models(started).items())
    )


def file_bytes(path: Path) -> int:
    """Bytes of a model's weight files; 0 if there are none."""
    try:
        return sum(file.stat().st_size for file in path.glob("*.safetensors"))
    except OSError:
        return 0


def meter_of(settings: WorkerSettings) -> MemoryMeter:
    """A meter of the memory that this worker's models use."""
    return CudaMemory(0) if settings.computes_on_gpu else ProcessMemory()


def check(target: WorkerSettings, current: WorkerSettings, meter: MemoryMeter) -> None:
    """Check, as far as possible in advance, that a swap to ``target`` can succeed. Raises
    ``CheckpointError``, ``EngineMissing``, ``MemoryLimitExceeded``.
    """
    target, current = chosen(target), chosen(current)
    _check_files(target)
    if target.tensor_parallel > 1:
        # vLLM's processes take the memory, one per GPU: only vLLM knows what fits there.
        return
    weights, pool = weight_bytes(target), pool_bytes_of(target)
    loading = int(weights * _LOADING_SHARE)
    # On the CPU, a pool takes memory only as it fills.
    peak = max(loading, weights + pool) if target.computes_on_gpu else loading
    free, used = meter.free_bytes(), meter.used_bytes()
    freed = weight_bytes(current)
    if target.computes_on_gpu and current.computes_on_gpu:
        freed = max(freed, used)  # includes its pool: torch holds nothing else there
    hard = round(target.memory.hard_gib * GIB)
    room = free + freed
    if hard:
        room = min(room, hard - max(0, used - freed))
    if peak > room:
        is_limited = hard and room < free + freed
        limit = "TIDEGATE_WORKER__MEMORY__HARD_GIB" if is_limited else "the machine"
        raise MemoryLimitExceeded(
            f"{name_of(target)} needs about {peak / GIB:.2f} GiB to load, and {limit} leaves"
            f" {max(0, room) / GIB:.2f} GiB once {name_of(current)} is gone; raise the limit, use"
            " a smaller model or fewer KV blocks, or quantize it"
        )


def weight_bytes(settings: WorkerSettings) -> int:
    """Approximate bytes of a model's weights in memory."""
    if not _computes(settings):
        return 0
    stored = file_bytes(settings.model_path)
    if settings.engine != "torch":
        return stored
    try:
        config = read_config(settings.model_path)
    except (OSError, ValueError):  # the old model's files may already be gone
        return stored
    own = {"float32": 4}.get(config.dtype, 2)
    return stored * _number_bytes(settings, config) // own


def pool_bytes_of(settings: WorkerSettings) -> int:
    """Bytes of the KV pool in the settings; 0 if it takes the free memory or only its engine
    knows. The checkpoint can be read."""
    if settings.engine != "torch" or not settings.kv.blocks:
        return 0
    config = read_config(settings.model_path)
    number_bytes = _number_bytes(settings, config)
    return settings.kv.blocks * block_bytes(config, BLOCK_TOKENS, number_bytes)


def _number_bytes(settings: WorkerSettings, config: ModelConfig) -> int:
    """Bytes per number of the data type in which our own engine computes."""
    import torch

    from worker.runner.device import choose_dtype

    return choose_dtype(settings, config, torch.device(settings.device)).itemsize


def _check_files(target: WorkerSettings) -> None:
    path = target.model_path
    if target.engine == "torch":
        if (problem := why_unservable(path)) is not None:
            raise BrokenCheckpoint(problem)
        read_config(path)
        from worker.models.checkpoint import Checkpoint

        with Checkpoint(path):  # reads headers and lengths, not the weights
            return
    if not path.exists():
        raise BrokenCheckpoint(f"{path} does not exist")
    if not _computes(target):
        read_config(path)
        return
    if find_spec("vllm") is None:
        raise EngineMissing(
            "the engine vllm is not installed in this worker's environment; start an instance with"
            " it: tidegate engines ensure vllm"
        )
    if not (path / "config.json").is_file():
        raise BrokenCheckpoint(f"{path}: not a checkpoint, it has no config.json")


def _computes(settings: WorkerSettings) -> bool:
    return not settings.engine.startswith("synthetic")
