"""Builds a vLLM engine, ready to start, with its tokenizer and model card, from settings."""

import hashlib
import math
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from protocol import Adapter, Feature, FinishReason, Sampling
from protocol.grammar_source import library_version as grammar_version
from protocol.model_digest import model_digest
from worker.core import Clock, Job
from worker.engine.card import end_tokens, model_card, version_of
from worker.engine.loop import EngineLoop
from worker.engines.stepped import LONGEST_LEAVE_S, SteppedBackend
from worker.engines.vllm.adapters import adapters_of, load_adapters
from worker.engines.vllm.arguments import check_settings, engine_config
from worker.engines.vllm.backend import CoreParts, VllmCore
from worker.engines.vllm.images import VisionReader, blank_file, open_images
from worker.engines.vllm.library import let_llvmlite_be_scanned, library_version, load_library
from worker.engines.vllm.prefix_cache import PrefixReports, block_hasher, keep_names_plain
from worker.engines.vllm.requests import end_mask
from worker.errors import BrokenCheckpoint
from worker.grammar.compiler import build_compiler
from worker.loaded import LoadedEngine, LoadTiming
from worker.log import model_log
from worker.memory import GIB
from worker.models.config import read_generation_config
from worker.runner.memory import ProcessMemory
from worker.settings import WorkerSettings
from worker.text import Tokenizer


def stated_ends(path: Path, stated: object, vocab_size: int) -> tuple[int, ...]:
    """Ids of the tokens that end an answer, by ``generation_config.json`` or else ``config.json``
    (``stated``)."""
    found = read_generation_config(path).get("eos_token_id")
    if found is None:
        found = stated
    listed = found if isinstance(found, list | tuple) else [found]
    return tuple(one for one in listed if isinstance(one, int) and 0 <= one < vocab_size)


def lacking(*, grammars: bool, kv_events: bool, speculates: bool) -> tuple[Feature, ...]:
    """Features that the engine lacks, for its card."""
    lacks = [Feature.SESSIONS]
    if not grammars:
        lacks.append(Feature.GRAMMAR)
    if not kv_events:
        lacks.append(Feature.KV_EVENTS)
    if speculates:  # vLLM refuses them with speculative decoding
        lacks += [Feature.LOGIT_BIAS, Feature.MIN_P]
    return tuple(sorted(lacks))


def engine_digest(settings: WorkerSettings, model: Any) -> str:
    """Hex SHA-256 over the code, versions and settings that affect the tokens."""
    stated = sorted(settings.engine_args.items())
    sums = settings.deterministic, settings.tensor_parallel
    facts = (library_version(), version_of("torch"), str(model.dtype), stated, sums)
    digest = hashlib.sha256(repr(facts).encode())
    for code in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(code.name.encode() + b"\0" + code.read_bytes())
    return digest.hexdigest()


_SMALL_BYTES: Final = 64 * 2**20
"""Bytes of weights below which one thread computes faster than several."""
_SET_NUM_THREADS: Final = torch.set_num_threads
"""Torch's own function, which vLLM replaces with one that does nothing."""


def build_engine(settings: WorkerSettings, clock: Clock = time.monotonic) -> LoadedEngine:
    """Load the checkpoint that ``settings`` name.

    Raises ``EngineMissing``, ``DeviceUnavailable``, ``CheckpointError``, ``TokenizerError``, and
    ``ValueError`` for settings that do not fit this engine.
    """
    check_settings(settings)
    # On threads that end: OpenMP keeps workers for every thread that has computed.
    with ThreadPoolExecutor(2, "tidegate-build") as threads:
        return threads.submit(_build, settings, clock, threads).result()


def _build(settings: WorkerSettings, clock: Clock, threads: ThreadPoolExecutor) -> LoadedEngine:
    timing = LoadTiming()
    path = settings.model_path
    hashing = threads.submit(timing.timed("digest")(model_digest), path)
    with timing.timed("import"):
        load_library(settings)
    with timing.timed("config"):
        config = engine_config(settings)
        if _STATED.isdisjoint(settings.engine_args):
            # By default vLLM takes a share of all memory, or stops.
            bound = _bound_cpu if settings.device == "cpu" else _bound_gpu
            bound(settings, config)
    model = config.model_config
    vocab_size = model.get_vocab_size()
    own_context = int(model.max_model_len)
    with timing.timed("tokenizer"):
        stated = stated_ends(path, getattr(model.hf_config, "eos_token_id", None), vocab_size)
        tokenizer = Tokenizer.from_directory(path, stated)
        eos = end_tokens(stated, tokenizer, vocab_size, path)
        speculates = config.speculative_config is not None
        grammars = None if speculates else build_compiler(tokenizer.json, vocab_size, eos)
    set_threads = partial(_set_threads, threads_for(settings))
    set_threads()
    if settings.device == "cpu" and torch.cpu._is_amx_tile_supported():
        # AMX tiles must be requested once per process; in Triton's stub nothing else does.
        torch.cpu._init_amx()
    digest = hashing.result()
    with timing.timed("model_load"):
        adapters = adapters_of(settings)
        images = open_images(settings, config, tokenizer)
        salt = bytes.fromhex(digest)
        parts = start_core(settings, config, eos, salt, adapters, images, set_threads)
    most = int(config.scheduler_config.max_num_seqs)
    if settings.device == "cpu" or "max_running" in settings.model_fields_set:
        most = min(settings.max_running, most)
    with timing.timed("warm_up"):
        warm_up(parts, most)
    gpus = config.parallel_config.world_size
    card = model_card(
        settings,
        tokenizer,
        device="cpu" if settings.device == "cpu" else f"cuda:{','.join(map(str, range(gpus)))}",
        gpus=gpus,
        model_digest=digest,
        engine_digest=engine_digest(settings, model),
        engine_version=f"{version_of('tidegate')}, {library_version()}",
        vocab_size=vocab_size,
        eos_token_ids=eos,
        block_tokens=parts.block_tokens,
        context_tokens=model.max_model_len,
        full_context_tokens=max(own_context, model.max_model_len),
        max_running=most,
        max_step_tokens=config.scheduler_config.max_num_batched_tokens,
        grammars=grammar_version() if grammars is not None else "",
        lacks=lacking(
            grammars=grammars is not None,
            kv_events=parts.reports is not None,
            speculates=speculates,
        ),
        can_pause=parts.can_pause,
        can_continue=parts.can_continue,
        abort_ms=LONGEST_LEAVE_S * 1e3 if parts.has_kv_connector else 0.0,
        quantization="none" if model.quantization is None else str(model.quantization),
        tensor_parallel=config.parallel_config.tensor_parallel_size,
        adapters=adapters,
        vision=None if images is None else images.vision,
    )
    backend = SteppedBackend(
        VllmCore(parts),
        card,
        frees_at_once=not parts.has_kv_connector,
        kv_events=parts.reports,
        clock=clock,
    )
    engine = EngineLoop(backend, card.eos_token_ids, clock=clock)
    return LoadedEngine.timed(engine, tokenizer, card, timing, grammars)


def threads_for(settings: WorkerSettings) -> int:
    """Number of threads for a step on the CPU; 0 leaves it to ``OMP_NUM_THREADS`` and torch."""
    if settings.device != "cpu" or "OMP_NUM_THREADS" in os.environ:
        return 0
    weights = sum(file.stat().st_size for file in settings.model_path.glob("*.safetensors"))
    return 1 if weights < _SMALL_BYTES else 0


def _set_threads(count: int) -> None:
    """Set torch's number of threads for the calling thread; 0 changes nothing. OpenMP has one
    number per thread, and vLLM's kernels need the loading and the computing thread to agree."""
    if count:
        _SET_NUM_THREADS(count)


_PROMPT = (0, 1, 2, 3)
_TOKENS = 3
_GREEDY = Sampling(max_tokens=_TOKENS, temperature=0.0, logprobs=1, prompt_logprobs=1)
_DRAWN = Sampling(
    max_tokens=_TOKENS,
    min_tokens=1,
    top_p=0.9,
    top_k=2,
    seed=1,
    logprobs=2,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    frequency_penalty=0.1,
    logit_bias=((0, 1.0),),
)
_FILTERED = Sampling(max_tokens=_TOKENS, top_p=0.9, min_p=0.1)


def warm_up(parts: CoreParts, most: int) -> None:
    """Warm up vLLM with every kind of request, ``most`` jobs at a time. Raises ``BrokenCheckpoint``
    if it fails on an image.

    vLLM compiles parts of its sampler when a request first needs them, and again for the first
    batch of more than one: about ten seconds each on a CPU, while all jobs wait.
    """
    core = VllmCore(parts)
    speculates = parts.core.vllm_config.speculative_config is not None
    second = [_GREEDY] if speculates else [_DRAWN, _FILTERED, _GREEDY]
    for wave in ([_GREEDY], second[: max(1, most)]):
        _run(core, [Job(_PROMPT, sampling, math.inf) for sampling in wave])
    _run(core, [Job(_PROMPT, _GREEDY, math.inf, adapter=name) for name in parts.adapters][:1])
    if parts.images is not None:
        file, size = blank_file()
        vision = parts.images.vision
        ids = [*_PROMPT, *[vision.token_id] * vision.tokens_of(*size), *_PROMPT]
        try:
            _run(core, [Job(ids, _GREEDY, math.inf, images=[file])])
        except Exception as error:  # any error of a model's code
            raise BrokenCheckpoint(
                f"vLLM fails at an image with this model: {error};"
                " TIDEGATE_WORKER__ENGINE_ARGS=language_model_only=true has it read text only"
            ) from error
    parts.core.reset_prefix_cache()
    if parts.reports is not None:
        parts.reports.take()


def _run(core: VllmCore, jobs: Sequence[Job]) -> None:
    for handle, job in enumerate(jobs):
        core.add(handle, job, _TOKENS)
    while core.load().running or core.load().waiting:
        for made in core.step(0.1):
            if made.end is FinishReason.ERROR:
                raise RuntimeError(made.message)


_CPU_SHARE: Final = 0.25
"""Share of free memory for the KV cache, as for our own engine."""
_CPU_SHARE_ONE: Final = 0.5
_BYTES: Final = 2
"""Bytes per number in the KV cache, float16 or bfloat16."""
_GPU_SPARE_SHARE: Final = 0.03
"""Share of a GPU's free memory that stays free, as for our own engine."""
_STATED: Final = frozenset({"gpu_memory_utilization", "kv_cache_memory_bytes"})
"""vLLM's arguments for its memory; an operator's value for one takes precedence."""


def _bound_gpu(settings: WorkerSettings, config: Any) -> None:
    """Lower vLLM's share of each GPU to ``memory.hard_gib`` and, if it uses one GPU, to the memory
    that is free there."""
    cache, gpus = config.cache_config, config.parallel_config.world_size
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    # A query of the free memory opens a GPU, and each of several GPUs is for its own process.
    free = total if gpus > 1 else torch.cuda.mem_get_info()[0]
    cache.gpu_memory_utilization = gpu_share(
        cache.gpu_memory_utilization, total, free, settings.memory.hard_gib / gpus
    )


def gpu_share(usual: float, total: int, free: int, hard_gib: float) -> float:
    """Share (0 to 1) of a GPU's ``total`` bytes to take, ``usual`` or less. ``hard_gib`` is the
    most GiB; 0 for no such limit."""
    limits = [usual, free * (1 - _GPU_SPARE_SHARE) / total]
    if hard_gib:
        limits.append(hard_gib * GIB / total)
    return min(limits)


def _bound_cpu(settings: WorkerSettings, config: Any) -> None:
    """Limit the KV cache to the size of ``max_running`` whole contexts, and to a share of the free
    memory."""
    cache, model = config.cache_config, config.model_config
    if cache.num_gpu_blocks_override is not None:
        return
    parallel = config.parallel_config
    bytes_per_number = 4 if "float32" in str(model.dtype) else _BYTES
    token_bytes = (
        2
        * model.get_num_layers(parallel)
        * model.get_num_kv_heads(parallel)
        * model.get_head_size()
        * bytes_per_number
    )
    context = model.max_model_len if model.max_model_len > 0 else 2**17
    rounded = -(-context // cache.block_size) * cache.block_size + cache.block_size
    free = ProcessMemory().free_bytes() // settings.instances // parallel.world_size
    most = max(int(_CPU_SHARE * free), min(int(_CPU_SHARE_ONE * free), token_bytes * rounded))
    cache.kv_cache_memory_bytes = min(most, token_bytes * rounded * settings.max_running)


def start_core(
    settings: WorkerSettings,
    config: Any,
    eos_token_ids: tuple[int, ...],
    hash_salt: bytes,
    adapters: tuple[Adapter, ...],
    images: VisionReader | None,
    prepare_thread: Callable[[], None],
) -> CoreParts:
    """Load the model and its adapters. Raises ``BrokenCheckpoint`` with vLLM's message,
    ``MemoryError``."""
    from vllm.v1.engine.core import EngineCore
    from vllm.v1.executor import Executor

    has_failed = threading.Event()
    let_llvmlite_be_scanned()
    keep_names_plain(config)
    try:
        core = EngineCore(
            config,
            Executor.get_class(config),
            log_stats=False,
            executor_fail_callback=has_failed.set,
        )
    except (ValueError, KeyError, OSError, NotImplementedError) as error:
        where = config.model_config.model
        raise BrokenCheckpoint(f"{where}: vLLM cannot load it: {error}") from error
    pool = core.scheduler.kv_cache_manager.block_pool
    block_tokens = pool.hash_block_size
    vocab_size = config.model_config.get_vocab_size()
    hasher, reports = None, None
    if core.request_block_hasher is not None:
        hasher = block_hasher(block_tokens, hash_salt, adapters)
        groups = core.scheduler.kv_cache_config.kv_cache_groups
        if len(groups) == 1 and groups[0].kv_cache_spec.block_size == block_tokens:
            reports = PrefixReports(lambda name: pool.get_cached_block(name, [0]) is not None)
        else:
            model_log.info(
                "vLLM keeps this model's KV in several groups: its blocks are not reported"
            )
    return CoreParts(
        core=core,
        hasher=hasher,
        reports=reports,
        block_tokens=block_tokens,
        eos_token_ids=eos_token_ids,
        ends=end_mask(vocab_size, eos_token_ids),
        vocab_size=vocab_size,
        # Only the second model runner draws by seed, position and token, and knows where an answer
        # begins; with speculation, draws also depend on the speculative tokens.
        can_continue=config.use_v2_model_runner and config.speculative_config is None,
        # A connector may be about to pass on the blocks that a pause frees.
        can_pause=config.kv_transfer_config is None,
        has_kv_connector=config.kv_transfer_config is not None,
        has_failed=has_failed,
        prepare_thread=prepare_thread,
        adapters=load_adapters(core, settings),
        images=images,
    )
