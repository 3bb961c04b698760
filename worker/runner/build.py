"""Builds a torch runner: device, dtype, weights, KV pool, threads."""

from typing import Final

import numpy as np
import torch

from worker.attention import AttentionBackend, KVPool, PackedBatch
from worker.attention.choice import AttentionSetting, choose_attention
from worker.attention.reference import ReferenceAttention
from worker.choices import KeptChoices, machine_facts
from worker.cpu_kernels import draws as cpu_draws
from worker.cpu_kernels.block_products import may_use_amx
from worker.cpu_kernels.compiled import compiler_problem, give_up, toolchain
from worker.errors import NotDeterministic
from worker.kv_disk.cuda_copies import memory_of
from worker.loaded import LoadTiming
from worker.log import model_log
from worker.memory import GIB, MemoryLimits
from worker.models import fused
from worker.models.checkpoint import prefetch
from worker.models.config import ModelConfig
from worker.models.loader import Layout
from worker.models.model import Decoder, load_model
from worker.pinned import upload
from worker.runner.base import BuiltRunner
from worker.runner.cuda_runner import build_cuda_runner
from worker.runner.device import choose_dtype, is_small, open_device, set_threads
from worker.runner.forward import TILE_TOKENS, BatchForward, Forward, TiledForward
from worker.runner.memory import (
    CudaMemory,
    MemoryMeter,
    ProcessMemory,
    block_bytes,
    cpu_pool_bytes,
    cuda_pool_bytes,
    pool_bytes,
    text_guard,
)
from worker.runner.torch_runner import SlotLimits, TorchRunner
from worker.sampling.sampler import Sampler
from worker.settings import BLOCK_TOKENS, WorkerSettings

ATTENTION: Final[AttentionSetting] = "auto"
"""Attention backend: the fastest one that is accurate enough, measured at load. Tests name one."""


def build_torch_runner(
    settings: WorkerSettings,
    config: ModelConfig,
    eos_token_ids: tuple[int, ...],
    timing: LoadTiming,
) -> BuiltRunner:
    """Load the checkpoint and allocate the KV pool; ``timing`` records the time of each phase.

    Raises ``DeviceUnavailable``, ``CheckpointError``, ``MemoryError`` for a pool that does not fit,
    ``MemoryLimitExceeded`` if the hard limit is the reason, ``NotDeterministic``, or ``ValueError``
    for invalid settings.
    """
    prefetch(settings.model_path)
    with timing.timed("cuda_init" if settings.device == "cuda" else "cpu_init"):
        device = open_device(settings.device)
        if device.type == "cpu":
            set_threads(config)
            _compile_loops()
        dtype = choose_dtype(settings, config, device)
    facts = {"dtype": dtype, "numba": toolchain(), "model": config}
    choices = KeptChoices(settings.choices_path, machine_facts() | facts)
    layout = Layout(
        # Packed layers sum in the same order for any number of rows (``worker.models.linear``).
        small=is_small(config) and not settings.deterministic,
        measured=not settings.deterministic,
        choices=choices,
    )
    with timing.timed("model_load"):
        model = load_model(settings.model_path, config, dtype, device, layout)

    bytes_each = block_bytes(config, BLOCK_TOKENS, dtype.itemsize)
    blocks_per_job = -(-config.context_tokens // BLOCK_TOKENS)
    wanted = settings.max_running * blocks_per_job
    on_cuda = device.type == "cuda"
    meter: MemoryMeter = CudaMemory(device.index) if on_cuda else ProcessMemory()
    guard = text_guard(meter, MemoryLimits.of(settings.memory.hard_gib))
    context_bytes = blocks_per_job * bytes_each
    step_bytes = 0
    if on_cuda and not settings.kv.blocks:
        with timing.timed("profile"):
            tokens, rows = settings.max_step_tokens, settings.max_running
            step_bytes = largest_step_bytes(model, config, device, tokens=tokens, rows=rows)
            torch.cuda.empty_cache()
    free = meter.free_bytes()
    if on_cuda:
        budget = cuda_pool_bytes(free, step_bytes)
    else:
        budget = cpu_pool_bytes(free, settings.instances, context_bytes)
    if (allowed := pool_bytes(guard)) is not None:
        budget = min(budget, allowed)
    blocks = settings.kv.blocks or min(wanted, budget // bytes_each)
    if blocks < 1:
        guard.check(bytes_each)
        raise MemoryError(
            f"no memory is left on {device} for a KV block of {bytes_each} bytes; free some, or set"
            " TIDEGATE_WORKER__KV__BLOCKS to the number of blocks that it must hold"
        )
    guard.check(blocks * bytes_each)
    if blocks < blocks_per_job:
        model_log.warning(
            "the KV pool holds %d tokens, less than the model's context of %d: longer texts are"
            " refused. It has %.2f GiB of the memory that was free; for the whole context set"
            " TIDEGATE_WORKER__KV__BLOCKS=%d (%.2f GiB)",
            blocks * BLOCK_TOKENS,
            config.context_tokens,
            blocks * bytes_each / GIB,
            blocks_per_job,
            context_bytes / GIB,
        )
    # On CUDA the pool has one extra block: recorded decodes use it for padding rows.
    with timing.timed("kv_pool"):
        try:
            pool = _pool(config, BLOCK_TOKENS, blocks + on_cuda, dtype, device)
        except (RuntimeError, OSError, OverflowError) as error:  # from torch or the system
            raise MemoryError(
                f"a KV pool of {blocks + on_cuda} blocks does not fit on {device};"
                " lower TIDEGATE_WORKER__KV__BLOCKS or set it to 0"
            ) from error
    max_blocks = min(blocks, blocks_per_job)
    max_tokens = max_blocks * BLOCK_TOKENS
    with timing.timed("attention_choice"):
        forward, attention = _forward(settings, config, model, pool, max_tokens, choices)
    sampler = Sampler(
        eos_token_ids,
        device,
        slots=settings.max_running,
        vocab_size=config.vocab_size,
        max_tokens=max_tokens,
    )
    slots = SlotLimits(BLOCK_TOKENS, settings.max_running, max_blocks)
    if on_cuda:
        with timing.timed("warm_up"):
            runner: TorchRunner = build_cuda_runner(
                forward,
                sampler,
                slots,
                device=device,
                dummy_block=blocks,
            )
    else:
        runner = TorchRunner(forward, sampler, slots, device=device)
    name, arithmetic = "cpu", ""
    if on_cuda:
        name = torch.cuda.get_device_name(device)
    else:
        arithmetic = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"
        arithmetic += f", {model.products}, {toolchain()}"
        # The operating system may not allow the use of the CPU's AMX.
        arithmetic += ", AMX" if may_use_amx() else ""
    kind = str(dtype).removeprefix("torch.")
    memory = memory_of(pool.data)
    tile_tokens = TILE_TOKENS if settings.deterministic else model.tile_rows
    return BuiltRunner(
        runner, blocks, name, kind, attention, arithmetic, memory, guard, tile_tokens
    )


def _compile_loops() -> None:
    """Compile the loops now, so that no request waits for it. A failure costs only speed."""
    if compiler_problem() is not None:
        return
    try:
        fused.compile_loops()
        cpu_draws.compile_draws()
    except Exception as error:  # any compiler error
        give_up(f"{type(error).__name__}: {error}")


def _forward(
    settings: WorkerSettings,
    config: ModelConfig,
    model: Decoder,
    pool: KVPool,
    max_tokens: int,
    choices: KeptChoices,
) -> tuple[Forward, str]:
    """Build the forward pass. Returns it and the name of its attention."""
    attention = choose_attention(
        ATTENTION,
        pool,
        config.num_heads,
        windows=config.windows,
        deterministic=settings.deterministic,
        choices=choices,
    )
    if not settings.deterministic:
        by_team = settings.team_steps
        forward = BatchForward(
            model,
            attention.backend,
            max_running=settings.max_running * by_team,
            max_step_tokens=settings.max_step_tokens * by_team,
        )
        return forward, attention.name
    tiled = TiledForward(model, attention.backend)

    def check() -> None:
        tiled.check(
            vocab_size=config.vocab_size,
            block_tokens=BLOCK_TOKENS,
            max_tokens=min(config.context_tokens, max_tokens),
            device=pool.device,
        )

    try:
        check()
    except NotDeterministic:
        threads = torch.get_num_threads()
        if pool.device.type != "cpu" or threads == 1:
            raise
        torch.set_num_threads(1)
        check()
        model_log.warning(
            "deterministic computes on one thread: on %d, this CPU's products give a token that is"
            " computed alone different logits",
            threads,
        )
    return tiled, attention.name


def _pool(
    config: ModelConfig, block_tokens: int, blocks: int, dtype: torch.dtype, device: torch.device
) -> KVPool:
    return KVPool(
        layers=config.num_layers,
        blocks=blocks,
        block_tokens=block_tokens,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        device=device,
    )


_SAMPLING_COPIES: Final = 3
"""Number of tensors as large as a step's logits that sampling may hold besides the logits."""
_PAGE: Final = 16


@torch.inference_mode()
def largest_step_bytes(
    model: Decoder, config: ModelConfig, device: torch.device, *, tokens: int, rows: int
) -> int:
    """Bytes that a step of ``tokens`` tokens, ``rows`` of them sampled, takes in addition to
    weights and pool: the peak allocation during such a step, on a separate pool.
    """
    batch = _prompts(tokens, config.context_tokens)
    pool = _pool(config, _PAGE, int(batch.block_table.max()) + 1, model.dtype, device)
    positions = np.concatenate([np.arange(count) for count in batch.query_tokens])
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step = _attention(pool, config).prepare(batch)
    ids = upload(np.zeros(tokens, np.int64), device)
    hidden = model.forward(ids, upload(positions, device), step)
    logits = model.logits(hidden[torch.arange(rows, device=device) % tokens])
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    return peak + _SAMPLING_COPIES * logits.nbytes


def _prompts(tokens: int, longest: int) -> PackedBatch:
    """Prompts of ``longest`` tokens each, ``tokens`` in total; the last prompt may be shorter."""
    begins = np.arange(0, tokens, longest)
    counts = np.minimum(longest, tokens - begins)
    blocks = -(-counts // _PAGE)
    first_blocks = np.cumsum(blocks) - blocks
    table = first_blocks[:, None] + np.minimum(np.arange(blocks.max()), blocks[:, None] - 1)
    slots = [first * _PAGE + np.arange(n) for first, n in zip(first_blocks, counts, strict=True)]
    return PackedBatch(
        decodes=0,
        query_tokens=counts,
        context_tokens=counts,
        block_table=table,
        slots=np.concatenate(slots),
    )


def _attention(pool: KVPool, config: ModelConfig) -> AttentionBackend:
    if pool.device.type == "cuda":
        try:
            from worker.attention.triton_backend import TritonAttention

            return TritonAttention(pool, config.num_heads, windows=config.windows)
        except ImportError:
            pass
    return ReferenceAttention(pool, config.num_heads, windows=config.windows)
