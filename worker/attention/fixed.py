"""Attention whose result depends only on the token's own text (WK-3). Kernels round differently for
different shapes. Here each kernel has one shape in any batch: one token's queries and one *span* of
keys, counted from the start of its text. The spans' results are then summed in order, weighted as
in Flash-Decoding (Dao et al. 2023)::

    keys of a text    0 … 127 | 128 … 255 | 256 … 300        token at position 300: three spans
    batch of a step   [token 0: span 0, 1, 2], [token 1: span 0], …

Keys after the token's position get weight 0, which adds exactly 0.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from worker.attention.paged import KVPool, PackedBatch

SPAN_TOKENS: Final = 128


class FixedAttention:
    """An ``AttentionBackend`` on the CPU, for steps with one token per row."""

    def __init__(self, pool: KVPool, num_heads: int, *, windows: Sequence[int] = ()) -> None:
        """``windows``: keys that a query of each layer sees, 0: all; empty: all keys in all layers.

        Raises ``ValueError`` if the block size does not divide a span.
        """
        if SPAN_TOKENS % pool.block_tokens:
            raise ValueError(
                f"deterministic mode needs blocks that divide {SPAN_TOKENS} tokens, not blocks of"
                f" {pool.block_tokens}"
            )
        self._pool = pool
        self._shared = num_heads // pool.kv_heads
        self._windows = tuple(windows) or (0,) * len(pool.data)

    def prepare(self, batch: PackedBatch) -> "FixedStep":
        """Lay out the spans of the step's tokens, with masks for keys that a token must not see."""
        assert batch.decodes == len(batch.query_tokens), "a row has more than one token"
        by_window = {window: self._spans(batch, window) for window in set(self._windows)}
        by_layer = [by_window[window] for window in self._windows]
        return FixedStep(self._pool, torch.from_numpy(batch.slots), by_layer, self._shared)

    def _spans(self, batch: PackedBatch, window: int) -> "_Spans":
        pool, contexts, table = self._pool, batch.context_tokens, batch.block_table
        first_seen = np.maximum(0, contexts - window) if window else np.zeros_like(contexts)
        first_span = first_seen // SPAN_TOKENS
        counts = -(-contexts // SPAN_TOKENS) - first_span
        row_of = np.repeat(np.arange(len(contexts)), counts)
        nth = np.arange(len(row_of)) - np.repeat(counts.cumsum() - counts, counts)
        span = (first_span[row_of] + nth)[:, None]
        blocks_per_span = SPAN_TOKENS // pool.block_tokens
        columns = span * blocks_per_span + np.arange(blocks_per_span)
        # The last span may extend past the table: any block works there, because it is masked.
        blocks = table[row_of[:, None], np.minimum(columns, table.shape[1] - 1)]
        keys = span * SPAN_TOKENS + np.arange(SPAN_TOKENS)
        seen = (keys < contexts[row_of, None]) & (keys >= first_seen[row_of, None])
        mask = np.where(seen, 0.0, -math.inf).astype(np.float32)
        return _Spans(
            row_of=torch.from_numpy(row_of),
            blocks=torch.from_numpy(blocks.ravel()),
            mask=torch.from_numpy(mask).to(pool.data.dtype).view(-1, 1, 1, SPAN_TOKENS),
            by_number=[
                (torch.from_numpy(row_of[at]), torch.from_numpy(at))
                for at in (np.flatnonzero(nth == i) for i in range(int(counts.max())))
            ],
        )


@dataclass(frozen=True, slots=True)
class _Spans:
    """``row_of`` [spans], ``blocks`` [spans * blocks of a span], ``mask`` [spans, 1, 1, keys].

    ``by_number[i]``: the rows that have an i-th span, and the indices of those spans.
    """

    row_of: Tensor
    blocks: Tensor
    mask: Tensor
    by_number: Sequence[tuple[Tensor, Tensor]]


class FixedStep:
    """Attention of one step."""

    def __init__(self, pool: KVPool, slots: Tensor, spans: Sequence["_Spans"], shared: int) -> None:
        """``spans`` has one entry per layer."""
        self._pool = pool
        self._slots = slots
        self._spans = spans
        self._shared = shared

    def attend(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        """See ``AttentionStep``."""
        spans, kv_heads = self._spans[layer], self._pool.kv_heads
        tokens, _, dim = queries.shape
        cache = self._pool.data[layer]
        cache.flatten(0, 1).index_copy_(0, self._slots, keys_values)
        gathered = cache.flatten(1).index_select(0, spans.blocks)
        keys, values = (
            gathered.view(-1, SPAN_TOKENS, 2 * kv_heads, dim).transpose(1, 2).chunk(2, dim=1)
        )
        folded = queries.reshape(tokens, kv_heads, self._shared, dim).index_select(0, spans.row_of)
        # Results [spans, kv_heads, shared, dim] and log-sum-exp weights of each span alone.
        mixed, weights = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            folded, keys, values, 0.0, False, attn_mask=spans.mask
        )
        return _merge(mixed.float(), weights, spans, tokens).to(queries.dtype).flatten(1, 2)


def _merge(mixed: Tensor, weights: Tensor, spans: _Spans, tokens: int) -> Tensor:
    """Merge each token's spans, first to last: results [tokens, kv_heads, shared, dim]."""
    # Every token has a first span; the first spans are in token order.
    highest = weights[spans.by_number[0][1]]
    for rows, which in spans.by_number[1:]:
        highest[rows] = torch.maximum(highest[rows], weights[which])
    shares = (weights - highest[spans.row_of]).exp_().unsqueeze(-1)
    mixed = mixed * shares
    total = mixed.new_zeros((tokens, *shares.shape[1:]))
    result = mixed.new_zeros((tokens, *mixed.shape[1:]))
    for rows, which in spans.by_number:
        total[rows] += shares[which]
        result[rows] += mixed[which]
    return result / total
