"""From settings to an engine that is ready to start, with its tokenizer and model card."""

import hashlib
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec

from worker.core import Clock, EngineService
from worker.engine.engine import Engine
from worker.errors import BrokenCheckpoint
from worker.kv_disk.base import Tier
from worker.kv_disk.build import open_disk_tier
from worker.log import model_log
from worker.models.config import ModelConfig, read_config
from worker.models.digest import model_digest
from worker.models.folder import model_name, why_unservable
from worker.models.generation import read_sampling_defaults
from worker.models.load_timing import Phases
from worker.protocol import ModelCard, SamplingDefaults
from worker.runner.base import BuiltRunner, Runner
from worker.runner.memory import MemoryLimits
from worker.runner.out_of_memory import StepMemory
from worker.runner.synthetic import FreeRunner, PacedRunner, StepCost
from worker.scheduler.block_pool import BlockPool
from worker.scheduler.scheduler import MAX_PAUSES, Scheduler, SchedulerConfig
from worker.settings import WorkerSettings
from worker.text import Tokenizer

_RESULT_CODE = (
    "engine",
    "scheduler",
    "runner",
    "sampling",
    "models",
    "attention",
    "core.py",
    "compiled.py",
)
"""Parts of the worker whose code has a say in which tokens come out."""
_CYCLE_WORDS = 64


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine that is loaded but not started, and what its callers need to talk to it."""

    engine: EngineService
    tokenizer: Tokenizer
    card: ModelCard
    load_ms: Mapping[str, float] = field(default_factory=dict)
    """How long each phase of the start took, some side by side; ``total`` is all of it (LB-6)."""


def build_engine(settings: WorkerSettings, clock: Clock = time.monotonic) -> LoadedEngine:
    """Load what ``settings`` name.

    Raises ``DeviceUnavailable``, ``CheckpointError``, ``TokenizerError``, ``ValueError`` for
    settings that do not fit each other, each with what to do about it.
    """
    _check(settings)
    phases = Phases()
    path = settings.model_path
    config = read_config(path)
    if settings.engine == "torch" and (problem := why_unservable(path)) is not None:
        raise BrokenCheckpoint(problem)  # before the tokenizer, which such a folder may lack too
    # On a thread that ends with it: OpenMP keeps workers for every thread that has computed, and
    # when they outnumber the cores none may spin any more, which costs a third of every step.
    with ThreadPoolExecutor(2, "tidegate-build") as aside:
        hashing = aside.submit(_timed_digest, path, phases)
        return aside.submit(_build, settings, config, clock, phases, hashing).result()


def _check(settings: WorkerSettings) -> None:
    """Raise ``ValueError`` for settings of which one would make another one mean nothing."""
    MemoryLimits.from_gib(settings.memory_soft_gib, settings.memory_hard_gib)
    if settings.kv_disk_path is not None and not settings.prefix_cache:
        raise ValueError(
            "TIDEGATE_WORKER_KV_DISK_PATH keeps what the prefix cache holds, and that is off; set"
            " TIDEGATE_WORKER_PREFIX_CACHE=true or name no path"
        )
    if settings.quantize != "none" and settings.weights == "mapped":
        raise ValueError(
            "mapped weights stay as they are in the files; set TIDEGATE_WORKER_QUANTIZE=none or"
            " TIDEGATE_WORKER_WEIGHTS=packed"
        )


def _timed_digest(path: Path, phases: Phases) -> str:
    with phases.timed("digest"):
        return model_digest(path)


def _build(
    settings: WorkerSettings,
    config: ModelConfig,
    clock: Clock,
    phases: Phases,
    hashing: Future[str],
) -> LoadedEngine:
    limits = SchedulerConfig(
        vocab_size=config.vocab_size,
        context_tokens=config.context_tokens,
        block_tokens=settings.block_tokens,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        max_step_tokens=settings.max_step_tokens,
        min_start_budget_s=settings.min_start_budget_ms / 1e3,
        max_stall_s=settings.max_stall_ms / 1e3,
        prefix_cache=settings.prefix_cache,
        max_pauses=MAX_PAUSES if settings.pause else 0,
    )
    path = settings.model_path
    with phases.timed("tokenizer"):
        tokenizer = Tokenizer.from_directory(
            path,
            config.eos_token_ids,
            special_in_prompts=settings.special_tokens_in_prompts,
        )
    eos = _end_tokens(path, config, tokenizer)
    defaults = SamplingDefaults()
    if settings.generation_config == "auto":
        defaults = read_sampling_defaults(path)
    if settings.engine == "torch":
        # Here, so that a synthetic engine starts without torch.
        from worker.runner.build import build_torch_runner

        built = build_torch_runner(settings, config, eos, phases)
    else:
        built = _build_synthetic(settings, config, tokenizer, eos, clock)

    scheduler = Scheduler(limits, BlockPool(built.blocks))
    digest = hashing.result()
    hash_salt = bytes.fromhex(digest)
    engine_digest = _engine_digest(settings, built)
    engine = Engine(
        scheduler,
        built.runner,
        eos,
        tier=_open_tier(settings, built, scheduler, digest, engine_digest),
        hash_salt=hash_salt,
        clock=clock,
        overlap=settings.overlap,
        memory=StepMemory(built.guard),
    )
    card = ModelCard(
        model=settings.model_name or model_name(path),
        context_tokens=scheduler.capacity_tokens,
        vocab_size=config.vocab_size,
        tokenizer_json=tokenizer.json,
        chat_template=tokenizer.chat_template,
        special_tokens=tokenizer.special_tokens,
        bos_token_id=config.bos_token_id
        if config.bos_token_id is not None
        else tokenizer.bos_token_id,
        eos_token_ids=eos,
        block_tokens=settings.block_tokens,
        hash_salt=hash_salt,
        engine=settings.engine,
        engine_version=_worker_version(),
        engine_digest=engine_digest,
        model_digest=digest,
        device=built.device,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        min_start_budget_ms=settings.min_start_budget_ms,
        max_step_tokens=settings.max_step_tokens,
        can_pause=settings.pause,
        full_context_tokens=config.context_tokens,
        sampling_defaults=defaults,
    )
    if defaults != SamplingDefaults():
        model_log.info(
            "where requests do not say, sampling is that of generation_config.json (%s);"
            " TIDEGATE_WORKER_GENERATION_CONFIG=none turns that off",
            ", ".join(f"{name} {value}" for name, value in msgspec.to_builtins(defaults).items()),
        )
    total_ms = phases.total_ms()
    model_log.info(
        "%s is ready on %s after %.2f s: %s engine, %d KV blocks of %d tokens, context %d;"
        " ms by phase: %s",
        card.model,
        built.device,
        total_ms / 1e3,
        settings.engine,
        built.blocks,
        settings.block_tokens,
        card.context_tokens,
        phases,
    )
    return LoadedEngine(engine, tokenizer, card, phases.ms | {"total": total_ms})


def _open_tier(
    settings: WorkerSettings,
    built: BuiltRunner,
    scheduler: Scheduler,
    model_digest: str,
    engine_digest: str,
) -> Tier | None:
    if settings.kv_disk_path is None or built.memory is None:
        return None
    origin = model_digest
    if settings.deterministic:
        # What another engine computed is as good, but not the same to the last bit (WK-3).
        origin += engine_digest
    elif settings.quantize != "none":
        origin += settings.quantize
    return open_disk_tier(
        scheduler, built.memory, settings.kv_disk_path, settings.kv_disk_bytes, origin
    )


def _build_synthetic(
    settings: WorkerSettings,
    config: ModelConfig,
    tokenizer: Tokenizer,
    eos: tuple[int, ...],
    clock: Clock,
) -> BuiltRunner:
    words = tokenizer.plain_words(_CYCLE_WORDS)
    if not words:
        raise ValueError(
            f"{settings.model_path}: the tokenizer has no plain words for a synthetic engine"
        )
    end_id = None
    if settings.synthetic_lengths == "prompt":
        if not eos:
            raise ValueError(
                f"{settings.model_path}: no end token for TIDEGATE_WORKER_SYNTHETIC_LENGTHS=prompt;"
                " name one in its config.json or set cap"
            )
        end_id = eos[0]
    runner: Runner
    if settings.engine == "synthetic-free":
        runner = FreeRunner(words, end_id=end_id)
    else:
        cost = StepCost(
            settings.synthetic_step_ms / 1e3,
            settings.synthetic_row_ms / 1e3,
            settings.synthetic_prompt_token_ms / 1e3,
        )
        runner = PacedRunner(
            words, cost, end_id=end_id, slow_file=settings.synthetic_slow_file, clock=clock
        )
    blocks_per_job = -(-config.context_tokens // settings.block_tokens)
    blocks = settings.kv_blocks or settings.max_running * blocks_per_job
    return BuiltRunner(runner, blocks, "none", "none")


def _engine_digest(settings: WorkerSettings, built: BuiltRunner) -> str:
    """Hex SHA-256 over the code and settings that have a say in which tokens come out."""
    digest = hashlib.sha256()
    root = Path(__file__).resolve().parent.parent
    for part in _RESULT_CODE:
        for file in sorted((root / part).rglob("*.py")) or [root / part]:
            digest.update(file.relative_to(root).as_posix().encode() + b"\0" + file.read_bytes())
    facts = {
        "torch": _version_of("torch"),
        "triton": _version_of("triton"),
        "engine": settings.engine,
        "device": built.device,
        "dtype": built.dtype,
        "weights": settings.weights,
        "quantize": settings.quantize,
        "attention": built.attention,
        "arithmetic": built.arithmetic,
        "block_tokens": settings.block_tokens,
        "deterministic": settings.deterministic,
        "max_step_tokens": settings.max_step_tokens,
        "max_running": settings.max_running,
    }
    digest.update(repr(sorted(facts.items())).encode())
    return digest.hexdigest()


def _worker_version() -> str:
    return _version_of("tidegate")


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout that was not installed
        return "unknown"


def _end_tokens(path: Path, config: ModelConfig, tokenizer: Tokenizer) -> tuple[int, ...]:
    """All that end an answer: the model's, and the tokenizer's own (a chat model's end of turn)."""
    own = tokenizer.eos_token_id
    if own is None or own in config.eos_token_ids:
        found = config.eos_token_ids
    elif own < config.vocab_size:
        found = (*config.eos_token_ids, own)
    else:
        model_log.warning(
            "%s: the tokenizer's eos_token has id %d, outside the model's vocabulary of %d tokens,"
            " and can never come",
            path,
            own,
            config.vocab_size,
        )
        found = config.eos_token_ids
    if not found:
        model_log.warning("%s names no end token: answers end at their limit only", path)
    return found
