"""Attention by our own kernel in the ``triton`` language, which reads the pool's pages directly.

Decodes use small tiles of queries, prompt chunks large ones. A tile's keys are split over several
programs, in proportion to its share of the step's work. A decode can read all of its inputs from
fixed tensors, so that a CUDA graph can record it (``decode_step``).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.attention.paged import KVPool, PackedBatch
from worker.pinned import pack_int32, upload


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a pass is cut: queries times heads (``lines``) and keys per tile; warps and loads in
    flight (``stages``) per program; programs that run at once per multiprocessor; and the minimum
    tiles of keys per item."""

    lines: int
    keys: int
    warps: int
    stages: int
    at_once: int
    least_tiles: int


_DECODES: Final = Tiling(lines=16, keys=64, warps=4, stages=2, at_once=5, least_tiles=2)
"""The matrix units multiply at least 16 lines. This tiling and those below were the fastest of
several on an H100; ``tests/worker/attention`` has their utilization of it."""
_CHUNKS: Final = Tiling(lines=64, keys=64, warps=4, stages=2, at_once=2, least_tiles=16)
LARGE_CHUNKS: Final = Tiling(lines=128, keys=128, warps=8, stages=3, at_once=1, least_tiles=8)
_LARGE_CHUNKS_BYTES: Final = 200 * 1024
"""Shared memory of a multiprocessor, in bytes, from which large chunk tiles fit well."""
_CPU_PROGRAMS: Final = 16
"""Target number of programs under Triton's interpreter, which has no multiprocessors."""
_PARTS_VALUES: Final = 8192
"""Number of values that a program of ``combine`` reads at once."""
_PLAN_BLOCK: Final = 64


class TritonAttention:
    """See ``AttentionBackend``. Raises ``ImportError`` if ``triton`` is not installed."""

    def __init__(
        self,
        pool: KVPool,
        num_heads: int,
        *,
        windows: Sequence[int] = (),
        invariant: bool = False,
        decodes: Tiling = _DECODES,
        chunks: Tiling | None = None,
    ) -> None:
        """``windows``: keys that a query of each layer sees, 0: all; empty: all keys in all layers.

        ``invariant``: decodes and chunks use the same tiles and one summation order in any batch,
        so that no result depends on other rows or on how a prompt was cut (WK-3); this is slower.
        ``chunks``: the tiling of chunks; None to choose it by the device.
        """
        from worker.attention import triton_kernels

        self._kernels = triton_kernels
        self._pool = pool
        self._heads = num_heads
        self._shared = num_heads // pool.kv_heads
        self._windows = tuple(windows)
        self._invariant = invariant
        self._exact = pool.data.dtype == torch.float32
        self._dim = pool.data.shape[-1]
        self._padded_dim = max(16, _power_of_two(self._dim))
        self._processors, shared_bytes = _CPU_PROGRAMS, 0
        if pool.device.type == "cuda":
            properties = torch.cuda.get_device_properties(pool.device)
            self._processors = properties.multi_processor_count
            shared_bytes = getattr(properties, "shared_memory_per_block_optin", 0)
        if chunks is None:
            is_large = shared_bytes >= _LARGE_CHUNKS_BYTES and not invariant
            chunks = LARGE_CHUNKS if is_large else _CHUNKS
        self._chunks = self._fitted(chunks)
        self._decodes = self._chunks if invariant else self._fitted(decodes)
        self.tile_tokens = self._chunks.lines // self._shared
        """Queries of a chunk per tile."""
        self._chunk_lines = self.tile_tokens * self._shared
        self._decode_lines = self._chunk_lines if invariant else self._shared
        """Lines in use in a tile."""

    def _fitted(self, tiling: Tiling) -> Tiling:
        """``tiling`` adapted to the pool's dtype and head size, so that the largest tiles do not
        spill registers (according to ptxas), with lines for all heads that share a KV head."""
        if self._exact:  # float32 has no matrix units
            tiling = replace(tiling, lines=min(tiling.lines, 32), keys=16, warps=8, stages=2)
        elif self._padded_dim >= 256:
            tiling = replace(tiling, lines=min(tiling.lines, 64), keys=32, warps=8, stages=2)
        return replace(tiling, lines=max(tiling.lines, _power_of_two(self._shared)))

    def prepare(self, batch: PackedBatch) -> "TritonStep":
        """See ``AttentionBackend``."""
        rows, decodes = len(batch.query_tokens), batch.decodes
        firsts = np.cumsum(batch.query_tokens) - batch.query_tokens
        contexts = batch.context_tokens
        tile_rows, tile_firsts, decoding, reading = self._shares_of(batch)
        (
            row_tokens,
            row_queries,
            row_contexts,
            host_table,
            decode_rows,
            zeros,
            tile_row,
            tile_first,
            *shared_out,
        ) = pack_int32(
            (
                firsts,
                batch.query_tokens,
                contexts,
                batch.block_table,
                np.arange(decodes),
                np.zeros(decodes, np.int64),
                tile_rows,
                tile_firsts,
                *decoding,
                *reading,
            ),
            self._pool.device,
        )
        table = batch.table_on_device
        if table is None:
            table = host_table.view(rows, -1)
        passes = []
        if decodes:
            items = _shared_out(shared_out[:3], decoding[2])
            lines = self._decode_lines
            passes.append(self._pass(decode_rows, zeros, items, self._decodes, lines))
        if rows > decodes:
            items = _shared_out(shared_out[3:], reading[2])
            lines = self._chunk_lines
            passes.append(self._pass(tile_row, tile_first, items, self._chunks, lines))
        return TritonStep(
            self,
            _Rows(table, row_tokens, row_queries, row_contexts),
            upload(batch.slots, self._pool.device),
            passes,
        )

    def _shares_of(
        self, batch: PackedBatch
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], "_HostItems", "_HostItems"]:
        """Row and first query of each query tile of the chunks; the items of all decodes and of all
        these tiles (``_items_of``)."""
        rows, decodes, contexts = len(batch.query_tokens), batch.decodes, batch.context_tokens
        tiles = -(-batch.query_tokens[decodes:] // self.tile_tokens)
        tile_rows = np.repeat(np.arange(decodes, rows), tiles)
        firsts = np.repeat(np.cumsum(tiles) - tiles, tiles)
        tile_firsts = (np.arange(len(tile_rows)) - firsts) * self.tile_tokens
        # Number of keys that a tile's last query sees.
        ends = contexts[tile_rows] - batch.query_tokens[tile_rows] + tile_firsts + self.tile_tokens
        decoding = self._items_of(contexts[:decodes], self._decodes)
        reading = self._items_of(np.minimum(ends, contexts[tile_rows]), self._chunks)
        return tile_rows, tile_firsts, decoding, reading

    def decode_step(
        self, slots: Tensor, table: Tensor, contexts: Tensor, most_keys: int
    ) -> "TritonStep":
        """A step of decodes that reads its batch from tensors that the caller refills.

        ``slots`` [rows] int64, ``table`` [rows, blocks] int32, ``contexts`` [rows] int32, at most
        ``most_keys`` each, at least 1. Its layers must be attended in order, from the first.
        """
        rows, device = len(contexts), self._pool.device
        counting = torch.arange(rows, dtype=torch.int32, device=device)
        zeros, ones = torch.zeros_like(counting), torch.ones_like(counting)
        count = rows
        if not self._invariant:
            tiles = -(-most_keys // self._decodes.keys)
            each = -(-tiles // self._decodes.least_tiles)
            count = min(self._aimed(self._decodes) + rows, rows * each)
        items = _Items(
            torch.full((4 * count,), -1, dtype=torch.int32, device=device),
            torch.empty_like(counting),
            torch.empty_like(counting),
            are_parts=count > rows,
        )
        a_pass = self._pass(counting, zeros, items, self._decodes, self._decode_lines)
        shared_out = replace(a_pass, is_planned_on_device=True)
        return TritonStep(self, _Rows(table, counting, ones, contexts), slots, [shared_out])

    def _aimed(self, tiling: Tiling) -> int:
        """Target number of items of a pass, for each KV head."""
        return max(1, tiling.at_once * self._processors // self._pool.kv_heads)

    def _items_of(self, keys: NDArray[np.int64], tiling: Tiling) -> "_HostItems":
        """The same as ``share_out``, for tiles with ``keys`` [tiles]: the items, flat; the index of
        each tile's first item; and each tile's number of items."""
        tiles = -(-keys // tiling.keys)
        size = max(tiling.least_tiles, -(-int(tiles.sum()) // self._aimed(tiling)))
        counts = np.maximum((2 * tiles + size) // (2 * size), 1)
        if self._invariant:
            counts[:] = 1
        firsts = np.cumsum(counts) - counts
        of_tile = np.repeat(np.arange(len(tiles)), counts)
        index = np.arange(len(of_tile))
        each = -(-tiles // counts)[of_tile]
        begin = (index - firsts[of_tile]) * each
        end = np.minimum(begin + each, tiles[of_tile])
        parts = np.where(counts[of_tile] > 1, index, -1)
        items = np.stack((of_tile, begin, end, parts), axis=1)
        # Longest first, so that no long item runs alone at the end.
        order = np.argsort(begin - end, kind="stable")
        return items[order].reshape(-1), firsts, counts

    def _pass(
        self, tile_rows: Tensor, tile_firsts: Tensor, items: "_Items", tiling: Tiling, lines: int
    ) -> "_Pass":
        shares = log_sums = None
        if items.are_parts:
            count, device = len(items.items) // 4, self._pool.device
            shape = count, self._pool.kv_heads, lines
            shares = torch.empty((*shape, self._dim), dtype=torch.float32, device=device)
            log_sums = torch.empty(shape, dtype=torch.float32, device=device)
        return _Pass(tile_rows, tile_firsts, items, tiling, lines, shares, log_sums)

    def plan(self, step: "TritonStep") -> None:
        """Divide the keys of passes whose lengths only the device knows."""
        for a_pass in step.passes:
            if not a_pass.is_planned_on_device:
                continue
            rows, items = len(a_pass.tile_rows), a_pass.items
            count = len(items.items) // 4
            self._kernels.share_out[(-(-count // _PLAN_BLOCK),)](
                step.rows.contexts,
                items.items,
                items.first_parts,
                items.part_counts,
                rows,
                count,
                max(1, count - rows),
                # With one item per row, no row is split.
                MIN_TILES=2**30 if count == rows else a_pass.tiling.least_tiles,
                TILE_KEYS=a_pass.tiling.keys,
                ROWS=_power_of_two(rows),
                BLOCK=_PLAN_BLOCK,
                num_warps=4,
            )

    def run(self, layer: int, step: "TritonStep", queries: Tensor, keys_values: Tensor) -> Tensor:
        """Store keys and values of one layer, and run the step's passes over it."""
        kv_heads, pool = self._pool.kv_heads, self._pool.data[layer]
        pool.flatten(0, 1).index_copy_(0, step.slots, keys_values)
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        for a_pass in step.passes:
            items, tiling = a_pass.items, a_pass.tiling
            shares, log_sums = a_pass.shares, a_pass.log_sums
            self._kernels.attend[(len(items.items) // 4, kv_heads)](
                queries,
                pool,
                out,
                out if shares is None else shares,
                out if log_sums is None else log_sums,
                items.items,
                step.rows.table,
                a_pass.tile_rows,
                a_pass.tile_firsts,
                step.rows.tokens,
                step.rows.queries,
                step.rows.contexts,
                math.log2(math.e) / math.sqrt(self._dim),
                queries.stride(0),
                queries.stride(1),
                step.rows.table.stride(0),
                WINDOW=self._windows[layer] if self._windows else 0,
                SHARED=self._shared,
                KV_HEADS=kv_heads,
                DIM=self._dim,
                PADDED_DIM=self._padded_dim,
                PAGE=self._pool.block_tokens,
                LINES=a_pass.lines,
                PADDED_LINES=tiling.lines,
                TILE_KEYS=tiling.keys,
                PRECISION="ieee" if self._exact else "tf32",
                num_warps=tiling.warps,
                num_stages=tiling.stages,
            )
            if shares is not None:
                tiles = len(a_pass.tile_rows)
                # Most tiles of a large step have one part: use few programs to find that out.
                is_busy = tiles * kv_heads >= self._processors
                group = min(a_pass.lines, self._shared) if is_busy else 1
                self._kernels.combine[(tiles, kv_heads, -(-a_pass.lines // group))](
                    shares,
                    log_sums,
                    out,
                    items.first_parts,
                    items.part_counts,
                    a_pass.tile_rows,
                    a_pass.tile_firsts,
                    step.rows.tokens,
                    step.rows.queries,
                    group,
                    SHARED=self._shared,
                    KV_HEADS=kv_heads,
                    DIM=self._dim,
                    PADDED_DIM=self._padded_dim,
                    LINES=a_pass.lines,
                    PARTS=_PARTS_VALUES // self._padded_dim,
                    num_warps=4,
                )
        return out


_HostItems = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a step: int32 on the device; see ``attend``'s ``table`` and ``row_*``."""

    table: Tensor
    tokens: Tensor
    queries: Tensor
    contexts: Tensor


@dataclass(frozen=True, slots=True)
class _Items:
    """See ``attend``'s ``items`` (here flat) and ``combine``'s ``first_parts`` and
    ``part_counts``. ``are_parts``: whether a tile may have more than one."""

    items: Tensor
    first_parts: Tensor
    part_counts: Tensor
    are_parts: bool


@dataclass(frozen=True, slots=True)
class _Pass:
    """One launch over tiles with ``lines`` lines in use.

    ``shares`` [items, kv_heads, lines, head_dim] and ``log_sums`` [items, kv_heads, lines] hold
    what the second launch adds up; all layers use the same, one after the other.
    """

    tile_rows: Tensor
    tile_firsts: Tensor
    items: _Items
    tiling: Tiling
    lines: int
    shares: Tensor | None
    log_sums: Tensor | None
    is_planned_on_device: bool = False


class TritonStep:
    """See ``AttentionStep``."""

    def __init__(
        self, backend: TritonAttention, rows: _Rows, slots: Tensor, passes: list[_Pass]
    ) -> None:
        self.rows = rows
        self.passes = passes
        self.slots = slots
        self._backend = backend

    def attend(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        """See ``AttentionStep``."""
        if layer == 0:
            self._backend.plan(self)
        return self._backend.run(layer, self, queries, keys_values)


def _shared_out(tensors: Sequence[Tensor], counts: NDArray[np.int64]) -> _Items:
    items, first_parts, part_counts = tensors
    return _Items(items, first_parts, part_counts, are_parts=bool((counts > 1).any()))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()
