"""Random batches over a pool, and the exact result of attention over them, in float64.

Backends are tried on these: by the tests, and when the worker loads.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.attention.paged import AttentionBackend, KVPool, PackedBatch

TOLERANCE: Final = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Largest ‖out - exact‖ / ‖exact‖ of a sound backend, by dtype: a few roundings of its products."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A batch with its queries [tokens, heads, head_dim] and new keys and values."""

    batch: PackedBatch
    queries: Tensor
    keys_values: Tensor


def make_trial(
    pool: KVPool,
    num_heads: int,
    contexts: Sequence[int],
    chunks: Sequence[tuple[int, int]],
    rng: np.random.Generator,
) -> Trial:
    """Make a batch of decodes of ``contexts`` keys each, then ``chunks`` (new tokens, all keys).

    Rows lie in distinct blocks in random order. Raises ``ValueError`` when the pool is too small.
    """
    blocks_total, page = pool.data.shape[1], pool.block_tokens
    query_tokens = np.array([1] * len(contexts) + [new for new, _ in chunks], np.int64)
    context_tokens = np.array([*contexts, *(keys for _, keys in chunks)], np.int64)
    blocks = -(-context_tokens // page)
    if blocks.sum() > blocks_total:
        raise ValueError(f"the trial needs {blocks.sum()} blocks, the pool has {blocks_total}")
    shuffled = rng.permutation(blocks_total)
    table = np.zeros((len(blocks), int(blocks.max()) + 1), np.int64)
    slots: list[NDArray[np.int64]] = []
    first = 0
    for row, (new, keys, count) in enumerate(
        zip(query_tokens, context_tokens, blocks, strict=True)
    ):
        table[row, :count] = shuffled[first : first + count]
        first += count
        positions = np.arange(keys - new, keys)
        slots.append(table[row, positions // page] * page + positions % page)
    batch = PackedBatch(
        decodes=len(contexts),
        query_tokens=query_tokens,
        context_tokens=context_tokens,
        block_table=table,
        slots=np.concatenate(slots),
    )
    dim, device = pool.data.shape[-1], pool.device
    generator = torch.Generator(device).manual_seed(int(rng.integers(2**31)))
    # As a fused projection gives them: heads of one token side by side.
    heads = torch.randn(
        (len(batch.slots), num_heads + 2 * pool.kv_heads, dim), generator=generator, device=device
    ).to(pool.data.dtype)
    queries, keys_values = heads.tensor_split((num_heads,), dim=1)
    return Trial(batch, queries, keys_values)


def exact(pool: KVPool, layer: int, trial: Trial, window: int = 0) -> Tensor:
    """Compute attention in float64, row by row, after storing the new keys and values.

    → [tokens, heads, head_dim] float64 on the pool's device.
    """
    batch, kv_heads = trial.batch, pool.kv_heads
    data = pool.data[layer]
    data.flatten(0, 1)[torch.from_numpy(batch.slots).to(pool.device)] = trial.keys_values
    results, first = [], 0
    rows = zip(
        batch.query_tokens.tolist(), batch.context_tokens.tolist(), batch.block_table, strict=True
    )
    for new, keys, blocks in rows:
        pages = torch.from_numpy(blocks[: -(-keys // pool.block_tokens)]).to(pool.device)
        stored = data[pages].flatten(0, 1)[:keys].double()
        queries = trial.queries[first : first + new].double()
        shared = queries.shape[1] // kv_heads
        k, v = (half.repeat_interleave(shared, dim=1) for half in stored.chunk(2, dim=1))
        scores = torch.einsum("qhd,khd->hqk", queries, k) / math.sqrt(queries.shape[-1])
        ages = torch.arange(keys - new, keys)[:, None] - torch.arange(keys)
        hidden = (ages < 0) | (ages >= window) if window else ages < 0
        scores.masked_fill_(hidden.to(pool.device), -math.inf)
        results.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), v))
        first += new
    return torch.cat(results)


def error_of(backend: AttentionBackend, layer: int, trial: Trial, expected: Tensor) -> float:
    """‖out - expected‖ / ‖expected‖ of ``backend``; NaN when its results contain one."""
    out = backend.prepare(trial.batch).attend(layer, trial.queries, trial.keys_values)
    return float((out.double() - expected).norm() / expected.norm())
