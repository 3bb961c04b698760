"""Attention that gathers each row's pages and calls PyTorch's SDPA. Slow, obviously right.

The query heads that share a KV head are folded into the query axis: on a CPU this is several times
faster than ``enable_gqa``, with the same results on every device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from worker.attention.paged import KVPool, PackedBatch
from worker.pinned import upload


class ReferenceAttention:
    """Computes decode rows in one padded batch, then each prompt chunk separately."""

    def __init__(self, pool: KVPool, num_heads: int, *, windows: Sequence[int] = ()) -> None:
        """``windows``: keys that a query of each layer sees, 0: all; empty: all in all layers."""
        self._pool = pool
        self._windows = tuple(windows)
        self._shared = num_heads // pool.kv_heads
        self._scratch = pool.data.new_empty(0)

    def prepare(self, batch: PackedBatch, *, chunks_only: bool = False) -> "ReferenceStep":
        """Make masks and gather indices for all layers of a step, which needs at least one row."""
        groups: list[_Group] = []
        if batch.decodes and not chunks_only:
            groups.append(self._group(batch, 0, batch.decodes, first_token=0))
        first_token = batch.decodes
        for row in range(batch.decodes, len(batch.query_tokens)):
            groups.append(self._group(batch, row, row + 1, first_token))
            first_token += int(batch.query_tokens[row])
        pages = max(len(group.blocks) for group in groups)
        slots = self._to_device(batch.slots)
        return ReferenceStep(self._pool, slots, groups, self._pages(pages), self._windows)

    def _pages(self, count: int) -> Tensor:
        """A kept scratch buffer for ``count`` pages: fresh memory costs more than gathering."""
        if len(self._scratch) < count:
            page_values = self._pool.data[0, 0].numel()
            self._scratch = self._pool.data.new_empty(count, page_values)
        return self._scratch

    def _group(self, batch: PackedBatch, row: int, end: int, first_token: int) -> "_Group":
        """Rows ``row … end-1``, which compute the same number of tokens, as one padded batch."""
        rows, queries = end - row, int(batch.query_tokens[row])
        contexts = batch.context_tokens[row:end]
        blocks = -(-int(contexts.max()) // self._pool.block_tokens)
        # A query at position p sees keys 0 … p; the row's last query is its last token.
        last_seen = (contexts[:, None] - queries + np.arange(queries))[:, :, None]
        keys = np.arange(blocks * self._pool.block_tokens)
        masks: dict[int, Tensor] = {}
        for window in self._windows or (0,):
            if window not in masks:
                hidden = keys > last_seen
                if window:
                    hidden |= keys <= last_seen - window
                masks[window] = self._mask(hidden)
        return _Group(
            tokens=slice(first_token, first_token + rows * queries),
            rows=rows,
            queries=queries,
            blocks=self._to_device(np.ascontiguousarray(batch.block_table[row:end, :blocks])),
            masks=masks,
        )

    def _mask(self, hidden: NDArray[np.bool_]) -> Tensor:
        """Turn ``hidden`` [rows, queries, keys] into the mask that is added to the folded heads'
        scores."""
        rows, queries, keys = hidden.shape
        mask = torch.zeros(hidden.shape, dtype=self._pool.data.dtype)
        mask.masked_fill_(torch.from_numpy(hidden), -math.inf)
        by_head = mask.to(self._pool.device).view(rows, 1, 1, queries, keys)
        return by_head.expand(-1, -1, self._shared, -1, -1).flatten(2, 3)

    def _to_device(self, array: NDArray[np.int64]) -> Tensor:
        return upload(array.reshape(-1), self._pool.device)


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows of equal query length.

    ``blocks`` [rows * blocks]; ``masks`` [rows, 1, shared * queries, keys] by window, added to the
    scores.
    """

    tokens: slice
    rows: int
    queries: int
    blocks: Tensor
    masks: dict[int, Tensor]


class ReferenceStep:
    """Attention of one step, over the groups that ``prepare`` made."""

    def __init__(
        self,
        pool: KVPool,
        slots: Tensor,
        groups: list[_Group],
        scratch: Tensor,
        windows: tuple[int, ...],
    ) -> None:
        """``scratch`` [pages, values of a page] holds the pages of one group at a time."""
        self._pool = pool
        self._slots = slots
        self._groups = groups
        self._scratch = scratch
        self._windows = windows

    def attend(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        """See ``AttentionStep``."""
        self._pool.data[layer].flatten(0, 1).index_copy_(0, self._slots, keys_values)
        return self.attend_stored(layer, queries)

    def attend_stored(self, layer: int, queries: Tensor) -> Tensor:
        """Attend for the prepared rows only; the step's keys and values are already in the pool."""
        pages = self._pool.data[layer].flatten(1)
        window = self._windows[layer] if self._windows else 0
        if len(self._groups) == 1:
            group = self._groups[0]
            return self._attend_group(group, pages, queries[group.tokens], window)
        return torch.cat(
            [self._attend_group(g, pages, queries[g.tokens], window) for g in self._groups]
        )

    def _attend_group(self, group: _Group, pages: Tensor, queries: Tensor, window: int) -> Tensor:
        rows, tokens, kv_heads = group.rows, group.queries, self._pool.kv_heads
        heads, dim = queries.shape[1:]
        gathered = self._scratch[: len(group.blocks)]
        torch.index_select(pages, 0, group.blocks, out=gathered)
        keys_values = gathered.view(rows, -1, 2 * kv_heads, dim).transpose(1, 2)
        keys, values = keys_values.chunk(2, dim=1)
        # [rows, tokens, kv_heads, shared, dim] → [rows, kv_heads, shared * tokens, dim] and back
        by_head = queries.reshape(rows, tokens, kv_heads, -1, dim).permute(0, 2, 3, 1, 4)
        folded = by_head.reshape(rows, kv_heads, -1, dim)
        mixed = scaled_dot_product_attention(folded, keys, values, attn_mask=group.masks[window])
        by_token = mixed.view(rows, kv_heads, -1, tokens, dim).permute(0, 3, 1, 2, 4)
        return by_token.reshape(-1, heads, dim)
