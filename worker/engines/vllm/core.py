"""Starts vLLM's engine core in this process."""

import threading
from collections.abc import Callable
from typing import Any, Final

import torch

from protocol import Adapter
from worker.engines.vllm.adapters import load_adapters
from worker.engines.vllm.backend import CoreParts
from worker.engines.vllm.images import VisionReader
from worker.engines.vllm.library import let_llvmlite_be_scanned
from worker.engines.vllm.prefix_cache import PrefixReports, block_hasher
from worker.engines.vllm.requests import end_mask
from worker.errors import BrokenCheckpoint
from worker.log import model_log
from worker.memory import GIB
from worker.runner.memory import ProcessMemory
from worker.settings import WorkerSettings

_CPU_SHARE: Final = 0.25
"""Share of free memory for the KV cache, as for our own engine."""
_CPU_SHARE_ONE: Final = 0.5
_BYTES: Final = 2
"""Bytes of a number in the KV cache, float16 or bfloat16."""
_GPU_SPARE_SHARE: Final = 0.03
"""Share of a GPU's free memory that is left free, as by our own engine."""
_STATED: Final = frozenset({"gpu_memory_utilization", "kv_cache_memory_bytes"})
"""vLLM's arguments for its memory, which win where the operator gives one."""


def bound_memory(settings: WorkerSettings, config: Any) -> None:
    """Limit what vLLM takes to what is free. By itself it takes a share of all memory, or stops."""
    if _STATED.isdisjoint(settings.engine_args):
        bound = _bound_cpu if settings.device == "cpu" else _bound_gpu
        bound(settings, config)


def _bound_gpu(settings: WorkerSettings, config: Any) -> None:
    """Lower vLLM's share of each GPU to ``memory.hard_gib``, and where it uses one GPU, to the
    memory that is free there."""
    cache, gpus = config.cache_config, config.parallel_config.world_size
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    # Asking how much is free opens a GPU, and of several each is for a process of its own.
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
    """Limit the KV cache to what ``max_running`` whole contexts can use, and to a share of the free
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
        # begins; with speculation draws also depend on the guesses.
        can_continue=config.use_v2_model_runner and config.speculative_config is None,
        # A connector may be about to pass on the blocks that a pause frees.
        can_pause=config.kv_transfer_config is None,
        has_kv_connector=config.kv_transfer_config is not None,
        has_failed=has_failed,
        prepare_thread=prepare_thread,
        adapters=load_adapters(core, settings),
        images=images,
    )
