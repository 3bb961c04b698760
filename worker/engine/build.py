"""Builds an engine that is ready to start, with its tokenizer and model card, from settings."""

import hashlib
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from protocol.grammar_source import library_version
from protocol.model_digest import model_digest
from worker.core import Clock
from worker.engine.card import end_tokens, engine_digest, model_card
from worker.engine.engine import Engine, EngineConfig
from worker.engine.step_costs import fitting, largest, measure
from worker.errors import BrokenCheckpoint
from worker.grammar.compiler import GrammarCompiler, build_compiler
from worker.kv_disk.disk_tier import open_disk_tier
from worker.loaded import LoadedEngine, LoadTiming
from worker.log import model_log
from worker.models.config import read_config
from worker.models.folder import why_unservable
from worker.runner.out_of_memory import StepMemory
from worker.runner.script import DEFAULT_SCRIPT, read_script
from worker.runner.scripted import build_scripted_runner
from worker.runner.synthetic import CYCLE_WORDS, build_synthetic_runner, synthetic_args
from worker.scheduler.block_pool import BlockPool
from worker.scheduler.config import MAX_WAITING, SchedulerConfig
from worker.scheduler.scheduler import Scheduler
from worker.settings import BLOCK_TOKENS, WorkerSettings
from worker.text import Tokenizer


def build_engine(
    settings: WorkerSettings, clock: Clock = time.monotonic, *, measures: bool = False
) -> LoadedEngine:
    """Load the model in ``settings``; with ``measures`` the card has measured step times.

    Raises ``DeviceUnavailable``, ``CheckpointError``, ``TokenizerError``, and ``ValueError`` for
    settings that conflict; each message says what to do.
    """
    if settings.engine == "auto":  # not called by ``load_engine``, which chooses
        settings = settings.model_copy(update={"engine": "torch"})
    if settings.kv.disk_path is not None and not settings.kv.prefix_cache:
        raise ValueError(
            "TIDEGATE_WORKER__KV__DISK_PATH is set, but the prefix cache that it stores is off; set"
            " TIDEGATE_WORKER__KV__PREFIX_CACHE=true or leave the path unset"
        )
    # Runs on a thread that ends afterwards: OpenMP keeps workers for every thread that has
    # computed. When they outnumber the cores, none may spin, which costs a third of every step.
    with ThreadPoolExecutor(3, "tidegate-build") as threads:
        return threads.submit(_build, settings, clock, threads, measures).result()


def _build(
    settings: WorkerSettings, clock: Clock, threads: ThreadPoolExecutor, measures: bool
) -> LoadedEngine:
    timing = LoadTiming()
    path = settings.model_path
    config = read_config(path)
    script = None
    if settings.engine == "synthetic-scripted":
        script = read_script(synthetic_args(settings).script or DEFAULT_SCRIPT)
        config = replace(config, context_tokens=script.context_tokens)
    if settings.engine == "torch" and (problem := why_unservable(path)) is not None:
        raise BrokenCheckpoint(problem)  # before the tokenizer: such a folder may lack that too
    hashing = threads.submit(timing.timed("digest")(model_digest), path)
    read = settings
    if measures:
        settings = largest(read)
    limits = SchedulerConfig(
        vocab_size=config.vocab_size,
        context_tokens=config.context_tokens,
        block_tokens=BLOCK_TOKENS,
        max_running=settings.max_running,
        max_waiting=MAX_WAITING,
        max_step_tokens=settings.max_step_tokens,
        min_start_budget_s=settings.min_start_budget_ms / 1e3,
        tile_tokens=1,  # replaced by the runner's number once it is built
        prefix_cache=settings.kv.prefix_cache,
    )
    with timing.timed("tokenizer"):
        tokenizer = Tokenizer.from_directory(path, config.eos_token_ids)
    eos = end_tokens(config.eos_token_ids, tokenizer, config.vocab_size, path)
    compiling: Future[GrammarCompiler | None] | None = None
    if settings.engine == "torch" or script is not None:
        # Takes a second or more for a large vocabulary; runs while the weights load.
        compiling = threads.submit(build_compiler, tokenizer.json, config.vocab_size, eos)
    if settings.engine == "torch":
        # Imported here so that a synthetic engine starts without torch.
        from worker.runner.build import build_torch_runner

        built = build_torch_runner(settings, config, eos, timing)
    elif script is not None:
        built = build_scripted_runner(settings, script, tokenizer, eos, config.vocab_size)
    else:
        words = tokenizer.plain_words(CYCLE_WORDS)
        built = build_synthetic_runner(settings, config.context_tokens, words, eos, clock)
    limits = replace(limits, tile_tokens=built.tile_tokens)
    costs = built.step_costs
    if measures and settings.engine == "torch":
        with timing.timed("step_costs"):
            costs = measure(
                built.runner, limits, built.blocks, built.memory, on_cpu=settings.device == "cpu"
            )
        if costs is not None:
            model_log.info(
                "step time in ms by rows: %s; each prompt token adds %.3f, each 1,000 tokens of "
                "context %.3f; steps may be faster by %.2f in natural logarithm",
                ", ".join(f"{n} {ms:.2f}" for n, ms in zip(costs.rows, costs.step_ms, strict=True)),
                costs.prompt_token_ms,
                1000 * costs.context_token_ms,
                costs.doubt,
            )
            limits = fitting(read, limits, costs, built.blocks)
            sizes = limits.max_running, limits.max_step_tokens
            model_log.info("a step carries up to %d rows and %d tokens", *sizes)
            costs = costs.up_to(limits.max_running)
    grammars = compiling.result() if compiling is not None else None
    pool = BlockPool(built.blocks)
    if built.memory is not None:
        pool = BlockPool(built.blocks, built.memory.clear)
    scheduler = Scheduler(limits, pool)
    digest, own_digest = hashing.result(), engine_digest(settings, built)
    if script is not None:  # another script cannot continue its texts
        digest = hashlib.sha256(digest.encode() + script.text).hexdigest()
    has_model, bos = settings.engine == "torch", config.bos_token_id
    card = model_card(
        settings,
        tokenizer,
        device=built.device,
        model_digest=digest,
        engine_digest=own_digest,
        vocab_size=config.vocab_size,
        bos_token_id=tokenizer.bos_token_id if bos is None else bos,
        eos_token_ids=eos,
        block_tokens=BLOCK_TOKENS,
        context_tokens=scheduler.capacity_tokens,
        full_context_tokens=config.context_tokens,
        max_running=limits.max_running,
        max_step_tokens=limits.max_step_tokens,
        grammars="" if grammars is None else library_version(),
        can_pause=True,
        can_continue=True,
        quantization="none" if has_model else "",
        deterministic=settings.deterministic and has_model,
        step_costs=costs,
    )
    tier, kv = None, settings.kv
    if kv.disk_path is not None and built.memory is not None:
        # Another engine's KV is just as good, but not bit-identical (WK-3).
        origin = digest + own_digest if settings.deterministic else digest
        tier = open_disk_tier(scheduler, built.memory, kv.disk_path, kv.disk_bytes, origin)
    engine = Engine(
        scheduler,
        built.runner,
        EngineConfig(eos, card.hash_salt, overlap=settings.overlap),
        tier=tier,
        memory=StepMemory(built.guard),
        clock=clock,
    )
    return LoadedEngine.timed(engine, tokenizer, card, timing, grammars)
