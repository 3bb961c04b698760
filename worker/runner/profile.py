"""Measures what the largest step takes of a GPU's memory, before the KV pool takes the rest."""

from typing import Final

import numpy as np
import torch

from worker.attention import AttentionBackend, KVPool, PackedBatch
from worker.attention.reference import ReferenceAttention
from worker.models.config import ModelConfig
from worker.models.model import Model
from worker.pinned import upload

_SAMPLING_COPIES: Final = 3
"""Tensors of a step's logits that sampling may have at once, beside the logits themselves."""
_PAGE: Final = 16


@torch.inference_mode()
def largest_step_bytes(
    model: Model, config: ModelConfig, device: torch.device, *, tokens: int, rows: int
) -> int:
    """Bytes beside weights and pool that a step of ``tokens`` tokens takes, of which ``rows`` are
    sampled: the most that were allocated while one was computed, on a pool of its own.
    """
    batch = _prompts(tokens, config.context_tokens)
    pool = KVPool(
        layers=config.num_layers,
        blocks=int(batch.block_table.max()) + 1,
        block_tokens=_PAGE,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=model.dtype,
        device=device,
    )
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
    """Prompts of ``longest`` tokens, the last one shorter perhaps, of ``tokens`` in all."""
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
