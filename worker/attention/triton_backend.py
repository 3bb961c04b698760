"""Attention by our own kernel in the ``triton`` language, straight from the pool's pages.

Decodes run on small tiles whose keys are split over several programs, chunks of prompts on large
tiles of queries. Everything that a decode reads may lie in fixed tensors, so that a CUDA graph can
hold it (``decode_step``).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from worker.attention.paged import KVPool, PackedBatch
from worker.pinned import pack_int32, upload

_DECODE_ROWS: Final = 16
"""The fewest rows that the matrix units multiply."""
_CHUNK_ROWS: Final = 64
_EXACT_CHUNK_ROWS: Final = 32
"""Rows of a chunk's tile in float32, which has no matrix units: larger tiles spill registers."""
_MAX_SPLITS: Final = 32
_LEAST_SPLIT_KEYS: Final = 128
"""Fewest keys of a split: a shorter one is not worth the second pass."""
_CPU_PROGRAMS: Final = 16
"""Programs to aim at under Triton's interpreter, which has no multiprocessors to count."""


class TritonAttention:
    """See ``AttentionBackend``. Raises ``ImportError`` where ``triton`` is not installed."""

    def __init__(
        self,
        pool: KVPool,
        num_heads: int,
        *,
        windows: Sequence[int] = (),
        invariant: bool = False,
    ) -> None:
        """``windows``: keys that a query of each layer sees, 0: all; empty: all keys in all layers.

        ``invariant``: the same tiles and one order of sums for decodes and chunks, whatever the
        batch, so that no result depends on company or on how a prompt was cut (WK-3); slower.
        """
        from worker.attention import triton_kernels

        self._kernels = triton_kernels
        self._pool = pool
        self._heads = num_heads
        self._shared = num_heads // pool.kv_heads
        self._windows = tuple(windows)
        self._invariant = invariant
        self._exact = pool.data.dtype == torch.float32
        self._padded_dim = max(16, _power_of_two(pool.data.shape[-1]))
        chunk_rows = _EXACT_CHUNK_ROWS if self._exact else _CHUNK_ROWS
        self._chunk_rows = max(chunk_rows, _power_of_two(self._shared))
        self._decode_rows = (
            self._chunk_rows if invariant else max(_DECODE_ROWS, _power_of_two(self._shared))
        )
        device = pool.device
        self._programs = (
            2 * torch.cuda.get_device_properties(device).multi_processor_count
            if device.type == "cuda"
            else _CPU_PROGRAMS
        )

    def prepare(self, batch: PackedBatch) -> "TritonStep":
        """See ``AttentionBackend``."""
        rows, decodes = len(batch.query_tokens), batch.decodes
        firsts = np.cumsum(batch.query_tokens) - batch.query_tokens
        chunk_tokens = self._chunk_rows // self._shared
        tiles = -(-batch.query_tokens[decodes:] // chunk_tokens)
        tile_rows = np.repeat(np.arange(decodes, rows), tiles)
        tile_ends = np.cumsum(tiles)
        tile_firsts = (np.arange(len(tile_rows)) - np.repeat(tile_ends - tiles, tiles)) * (
            chunk_tokens
        )
        row_tokens, row_queries, row_contexts, table, decode_rows, zeros, tile_row, tile_first = (
            pack_int32(
                (
                    firsts,
                    batch.query_tokens,
                    batch.context_tokens,
                    batch.block_table,
                    np.arange(decodes),
                    np.zeros(decodes, np.int64),
                    tile_rows,
                    tile_firsts,
                ),
                self._pool.device,
            )
        )
        passes = []
        if decodes:
            longest = int(batch.context_tokens[:decodes].max())
            passes.append(self._decode_pass(decode_rows, zeros, decodes, longest))
        if rows > decodes:
            passes.append(_Pass(tile_row, tile_first, self._chunk_rows, 1, None, None))
        return TritonStep(
            self,
            _Rows(table.view(rows, -1), row_tokens, row_queries, row_contexts),
            upload(batch.slots, self._pool.device),
            passes,
        )

    def decode_step(
        self, slots: Tensor, table: Tensor, contexts: Tensor, most_keys: int
    ) -> "TritonStep":
        """A step of decodes that reads its batch from tensors which the caller refills.

        ``slots`` [rows] int64, ``table`` [rows, blocks] int32, ``contexts`` [rows] int32, at most
        ``most_keys`` each, at least 1.
        """
        rows, device = len(contexts), self._pool.device
        counting = torch.arange(rows, dtype=torch.int32, device=device)
        zeros, ones = torch.zeros_like(counting), torch.ones_like(counting)
        one_pass = self._decode_pass(counting, zeros, rows, most_keys)
        return TritonStep(self, _Rows(table, counting, ones, contexts), slots, [one_pass])

    def _decode_pass(
        self, tile_rows: Tensor, tile_firsts: Tensor, decodes: int, longest: int
    ) -> "_Pass":
        splits = 1
        if not self._invariant:
            wanted = self._programs / (decodes * self._pool.kv_heads)
            splits = _power_of_two(
                math.ceil(max(1.0, min(wanted, longest / _LEAST_SPLIT_KEYS, _MAX_SPLITS)))
            )
        if splits == 1:
            return _Pass(tile_rows, tile_firsts, self._decode_rows, 1, None, None)
        lines, device = decodes * self._heads, self._pool.device
        dim = self._pool.data.shape[-1]
        return _Pass(
            tile_rows,
            tile_firsts,
            self._decode_rows,
            splits,
            torch.empty((lines, splits, dim), dtype=torch.float32, device=device),
            torch.empty((lines, splits), dtype=torch.float32, device=device),
        )

    def run(self, layer: int, step: "TritonStep", queries: Tensor, out: Tensor) -> None:
        """Run the step's passes over one layer, whose keys and values are in the pool already."""
        data = self._pool.data
        dim, wide = queries.shape[-1], self._padded_dim >= 256
        for a_pass in step.passes:
            shares, log_sums = a_pass.shares, a_pass.log_sums
            self._kernels.attend[(len(a_pass.tile_rows), self._pool.kv_heads, a_pass.splits)](
                queries,
                data[layer],
                out if shares is None else shares,
                out if log_sums is None else log_sums,
                step.rows.table,
                a_pass.tile_rows,
                a_pass.tile_firsts,
                step.rows.tokens,
                step.rows.queries,
                step.rows.contexts,
                math.log2(math.e) / math.sqrt(dim),
                queries.stride(0),
                queries.stride(1),
                data.stride(1),
                data.stride(2),
                data.stride(3),
                step.rows.table.stride(0),
                WINDOW=self._windows[layer] if self._windows else 0,
                SHARED=self._shared,
                KV_HEADS=self._pool.kv_heads,
                DIM=dim,
                PADDED_DIM=self._padded_dim,
                PAGE=self._pool.block_tokens,
                TILE_ROWS=a_pass.tile_lines,
                # So that nothing spills and three programs fit on a multiprocessor (ptxas).
                TILE_KEYS=16 if self._exact else 32 if wide else 64,
                SPLITS=a_pass.splits,
                PRECISION="ieee" if self._exact else "tf32",
                num_warps=8 if self._exact or wide else 4,
                num_stages=2,
            )
            if shares is not None:
                self._kernels.combine[(len(shares),)](
                    shares,
                    log_sums,
                    out,
                    DIM=dim,
                    PADDED_DIM=self._padded_dim,
                    SPLITS=a_pass.splits,
                    num_warps=2,
                )

    def store(self, layer: int, slots: Tensor, keys_values: Tensor) -> None:
        """Write a step's keys and values into the pool."""
        self._pool.data[layer].flatten(0, 1).index_copy_(0, slots, keys_values)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a step: int32 on the device; see ``attend``'s ``table`` and ``row_*``."""

    table: Tensor
    tokens: Tensor
    queries: Tensor
    contexts: Tensor


@dataclass(frozen=True, slots=True)
class _Pass:
    """One launch: tiles of ``tile_lines`` lines, keys in ``splits`` shares.

    ``shares`` [lines, splits, head_dim] and ``log_sums`` [lines, splits] hold what the second
    launch adds up; all layers use the same, one after the other.
    """

    tile_rows: Tensor
    tile_firsts: Tensor
    tile_lines: int
    splits: int
    shares: Tensor | None
    log_sums: Tensor | None


class TritonStep:
    """See ``AttentionStep``."""

    def __init__(
        self, backend: TritonAttention, rows: _Rows, slots: Tensor, passes: list[_Pass]
    ) -> None:
        self.rows = rows
        self.passes = passes
        self._backend = backend
        self._slots = slots

    def attend(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        """See ``AttentionStep``."""
        self._backend.store(layer, self._slots, keys_values)
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        self._backend.run(layer, self, queries, out)
        return out


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
