"""Decides how many KV cells and how many threads llama.cpp gets."""

import os
from typing import Final

import torch

from worker.engines.llamacpp.gguf_file import GgufFile
from worker.engines.llamacpp.model import ContextShape, LoadedModel
from worker.engines.llamacpp.options import CELL_BYTES, Options
from worker.memory import MemoryLimits
from worker.runner.memory import (
    ProcessMemory,
    cpu_pool_bytes,
    pool_bytes,
    text_guard,
)
from worker.settings import WorkerSettings

_USUAL_TEXT: Final = 2048
"""Tokens to have cells for, in each of ``max_running`` texts. llama.cpp fills cells with zeros at
once, so that the longest texts that might come are not provided for."""
_ONE_THREAD_BYTES: Final = 64 * 2**20
"""Bytes of weights (as float32) below which one thread computes: a smaller model's step is over
before a second thread has begun."""
_GPU_SHARE: Final = 0.8


def context_shape(
    settings: WorkerSettings, options: Options, file: GgufFile, model: LoadedModel, on_gpu: bool
) -> ContextShape:
    """Size the context by ``settings`` or, without, by free memory. Raises ``MemoryError``."""
    context = model.trained_context
    per_cell = cell_bytes(file, options)
    wanted = max(context, settings.max_running * min(context, _USUAL_TEXT))
    if settings.kv.blocks:
        cells = settings.kv.blocks * settings.kv.block_tokens
    else:
        budget = _budget(settings, context * per_cell, on_gpu)
        cells = wanted if budget is None else min(wanted, budget // per_cell)
    if cells < settings.max_running:
        raise MemoryError(
            f"no memory is left for {settings.max_running} KV cells of {per_cell} bytes; free some,"
            " or set TIDEGATE_WORKER__KV__BLOCKS to what it must hold all the same"
        )
    return ContextShape(
        cells=cells,
        sequences=settings.max_running,
        batch_tokens=max(settings.max_step_tokens, settings.max_running),
        unified=True if options.kv_unified is None else options.kv_unified,
    )


def threads_for(settings: WorkerSettings, model: LoadedModel) -> int:
    """Number of threads for a step on the CPU."""
    if settings.cpu_threads:
        return settings.cpu_threads
    stated = os.environ.get("OMP_NUM_THREADS", "")
    if stated.isdecimal() and int(stated):
        return int(stated)
    if model.parameters * 4 < _ONE_THREAD_BYTES:
        return 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cell_bytes(file: GgufFile, options: Options) -> int:
    """Bytes that the KV of one token takes, in all layers."""
    layers = max(1, file.of_model("block_count"))
    heads = max(1, file.of_model("attention.head_count"))
    kv_heads = file.values.get(f"{file.architecture}.attention.head_count_kv", heads)
    head_dim = file.of_model("embedding_length") // heads
    keys = file.of_model("attention.key_length", head_dim) * CELL_BYTES[options.type_k]
    values = file.of_model("attention.value_length", head_dim) * CELL_BYTES[options.type_v]
    if isinstance(kv_heads, list):
        in_all = sum(_whole(one, 0) for one in kv_heads)
    else:
        in_all = _whole(kv_heads, heads) * layers
    return max(1, int(in_all * (keys + values)))


def _whole(value: object, default: int) -> int:
    return value if isinstance(value, int) and value > 0 else default


def _budget(settings: WorkerSettings, context_bytes: int, on_gpu: bool) -> int | None:
    """Bytes of free memory for the KV cells; None where that is unknown."""
    if on_gpu:
        if not torch.cuda.is_available():
            return None
        return int(torch.cuda.mem_get_info()[0] * _GPU_SHARE)
    memory = ProcessMemory()
    share = cpu_pool_bytes(memory.free_bytes(), settings.instances, context_bytes)
    allowed = pool_bytes(text_guard(memory, MemoryLimits.of(settings.memory.hard_gib)))
    return share if allowed is None else min(share, allowed)
