"""Puts a torch runner together: device, type, weights, KV pool, threads."""

from typing import Final

import torch

from worker.attention import KVPool
from worker.attention.choice import choose_attention
from worker.device import open_device
from worker.engine.compute import Compute, Tiled, Whole
from worker.engine.factory import BuiltRunner
from worker.engine.precision import choose_dtype, set_threads
from worker.engine.sampling import Sampler
from worker.engine.torch_runner import TorchRunner
from worker.log import model_log
from worker.models.checkpoint import prefetch
from worker.models.config import ModelConfig
from worker.models.loader import Layout
from worker.models.phases import Phases
from worker.models.registry import Model, load_model
from worker.settings import WorkerSettings

_CPU_POOL_BYTES: Final = 256 * 2**20
_CUDA_POOL_SHARE: Final = 0.8
"""Of the memory that is free once the weights are loaded; the rest is for activations."""


def build_torch_runner(
    settings: WorkerSettings,
    config: ModelConfig,
    eos_token_ids: tuple[int, ...],
    phases: Phases,
) -> BuiltRunner:
    """Load the checkpoint and allocate the KV pool; ``phases`` takes down what took how long.

    Raises ``DeviceUnavailable``, ``CheckpointError``, ``MemoryError`` for a pool that does not
    fit, ``NotDeterministic``, or ``ValueError`` for an attention backend that cannot run here.
    """
    prefetch(settings.model_path)
    with phases.timed("cuda_init" if settings.device == "cuda" else "cpu_init"):
        device = open_device(settings.device)
        dtype = choose_dtype(settings, config, device)
        if device.type == "cpu":
            set_threads(settings, config)
    layout = Layout(mapped=settings.weights == "mapped", int8=settings.quantize == "int8")
    with phases.timed("model_load"):
        model = load_model(settings.model_path, config, dtype, device, layout)

    block_bytes = (
        config.num_layers
        * settings.block_tokens
        * 2
        * config.num_kv_heads
        * config.head_dim
        * dtype.itemsize
    )
    blocks_per_job = -(-config.context_tokens // settings.block_tokens)
    wanted = settings.max_running * blocks_per_job
    blocks = settings.kv_blocks or min(wanted, _pool_bytes(device) // block_bytes)
    if blocks < 1:
        raise MemoryError(f"no memory is left on {device} for a KV block of {block_bytes} bytes")
    if blocks < blocks_per_job:
        model_log.warning(
            "the KV pool holds %d tokens, less than the model's context of %d; raise"
            " TIDEGATE_WORKER_KV_BLOCKS for longer texts",
            blocks * settings.block_tokens,
            config.context_tokens,
        )
    with phases.timed("kv_pool"):
        pool = _allocate_pool(config, settings.block_tokens, blocks, dtype, device)
    max_blocks = min(blocks, blocks_per_job)
    max_tokens = max_blocks * settings.block_tokens
    with phases.timed("attention_choice"):
        compute, attention = _compute(settings, config, model, pool, max_tokens)
    runner = TorchRunner(
        compute,
        Sampler(
            eos_token_ids,
            device,
            slots=settings.max_running,
            vocab_size=config.vocab_size,
            max_tokens=max_tokens,
        ),
        device=device,
        block_tokens=settings.block_tokens,
        max_running=settings.max_running,
        max_blocks=max_blocks,
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    arithmetic = ""
    if device.type == "cpu":
        arithmetic = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
    kind = str(dtype).removeprefix("torch.")
    return BuiltRunner(runner, blocks, name, kind, attention, arithmetic)


def _compute(
    settings: WorkerSettings, config: ModelConfig, model: Model, pool: KVPool, max_tokens: int
) -> tuple[Compute, str]:
    """And the name of its attention."""
    attention = choose_attention(
        settings.attention,
        pool,
        config.num_heads,
        windows=config.windows,
        deterministic=settings.deterministic,
    )
    if not settings.deterministic:
        return Whole(model, attention.backend), attention.name
    tiled = Tiled(model, attention.backend)
    tiled.check(
        vocab_size=config.vocab_size,
        block_tokens=settings.block_tokens,
        max_tokens=min(config.context_tokens, max_tokens),
        device=pool.device,
    )
    return tiled, attention.name


def _pool_bytes(device: torch.device) -> int:
    if device.type == "cpu":
        return _CPU_POOL_BYTES
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int(free_bytes * _CUDA_POOL_SHARE)


def _allocate_pool(
    config: ModelConfig, block_tokens: int, blocks: int, dtype: torch.dtype, device: torch.device
) -> KVPool:
    try:
        return KVPool(
            layers=config.num_layers,
            blocks=blocks,
            block_tokens=block_tokens,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=dtype,
            device=device,
        )
    except RuntimeError as error:  # torch's out-of-memory errors are of this type
        raise MemoryError(
            f"a KV pool of {blocks} blocks does not fit on {device};"
            " lower TIDEGATE_WORKER_KV_BLOCKS or set it to 0"
        ) from error
