"""Measures what the largest step takes of a GPU's memory, before the KV pool takes the rest."""

import numpy as np
import torch

from worker.attention import AttentionBackend, KVPool, PackedBatch
from worker.attention.reference import ReferenceAttention
from worker.models.config import ModelConfig
from worker.models.model import Model
from worker.pinned import upload

_SAMPLING_COPIES = 3
"""Tensors of a step's logits that sampling may have at once, beside the logits themselves."""


@torch.inference_mode()
def largest_step_bytes(
    model: Model, config: ModelConfig, device: torch.device, *, tokens: int, rows: int
) -> int:
    """Bytes beside weights and pool that a step of ``tokens`` tokens takes, of which ``rows`` are
    sampled: the most that were allocated while one was computed, on a pool of its own.
    """
    page = 16
    blocks = -(-tokens // page)
    pool = KVPool(
        layers=config.num_layers,
        blocks=blocks,
        block_tokens=page,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=model.dtype,
        device=device,
    )
    positions = np.arange(tokens)
    batch = PackedBatch(
        decodes=0,
        query_tokens=np.array([tokens]),
        context_tokens=np.array([tokens]),
        block_table=np.arange(blocks)[None],
        slots=positions,
    )
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step = _attention(pool, config).prepare(batch)
    ids = upload(np.zeros(tokens, np.int64), device)
    hidden = model.forward(ids, upload(positions, device), step)
    logits = model.logits(hidden[:rows])
    torch.cuda.synchronize(device)
    peak = torch.cuda.max_memory_allocated(device) - before
    return peak + _SAMPLING_COPIES * logits.nbytes * max(1, rows // len(logits))


def _attention(pool: KVPool, config: ModelConfig) -> AttentionBackend:
    try:
        from worker.attention.triton_backend import TritonAttention

        return TritonAttention(pool, config.num_heads, windows=config.windows)
    except ImportError:
        return ReferenceAttention(pool, config.num_heads, windows=config.windows)
