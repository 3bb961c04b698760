"""Attention on the CPU that reads the pool's pages directly, compiled by numba.

The reference copies every row's pages, padded to the longest row, before it attends: twice the
memory traffic, and more for short rows next to a long one. Here each decode reads its own pages
once, and long rows are split over the threads (``attention_loops``). Prompt chunks are packed and
multiplied in tiles (``prompt_loops``); on a CPU without AVX2, the reference computes them.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from worker.attention.paged import KVPool, PackedBatch
from worker.attention.reference import ReferenceAttention, ReferenceStep
from worker.cpu_kernels.block_products import products_problem
from worker.cpu_kernels.compiled import compiler_problem
from worker.cpu_kernels.team import FIRST_ARGUMENT, PARTS, Job, TeamTask

_WORTH_A_TEAM_KEYS: Final = 128
"""Minimum keys of all rows for several threads: fewer finish before another thread starts."""
_DTYPES = (torch.float32, torch.bfloat16)
_MOST_PACKED_BYTES: Final = 2**26
"""Maximum memory for the packed keys and values of several chunks at once, and maximum that is
kept: 16,000 tokens of an 8B model, whose step takes far longer than allocating fresh memory."""


class NumbaAttention:
    """An ``AttentionBackend`` for pools of float32 or bfloat16 on the CPU."""

    def __init__(self, pool: KVPool, num_heads: int, *, windows: Sequence[int] = ()) -> None:
        """``windows``: see ``ReferenceAttention``. Raises ``ImportError`` without numba and
        ``ValueError`` for any other dtype or device."""
        if (problem := compiler_problem()) is not None:
            raise ImportError(problem)
        if pool.device.type != "cpu" or pool.data.dtype not in _DTYPES:
            raise ValueError(f"it supports float32 and bfloat16 on the CPU, not {pool.data.dtype}")
        from worker.cpu_kernels import attention_loops, prompt_loops

        is_bfloat16, dim = pool.data.dtype == torch.bfloat16, pool.data.shape[-1]
        self.pool = pool
        self.heads = num_heads
        self.windows = tuple(windows) or (0,) * len(pool.data)
        self.pages = [layer.data_ptr() for layer in pool.data]
        self.fields = attention_loops.AT
        self.span_tokens = attention_loops.SPAN_TOKENS
        self.cut = attention_loops.spans()
        self.cut_chunks = prompt_loops.cut
        shape = num_heads, pool.kv_heads, dim
        self.tasks = [
            attention_loops.attend(*shape, pool.block_tokens, is_bfloat16),
            attention_loops.merge(num_heads, dim, is_bfloat16),
        ]
        """The tasks of a step, in order; see ``Work``."""
        self._reference: ReferenceAttention | None = None
        if products_problem() is None:
            self.tasks += (
                prompt_loops.pack(pool.kv_heads, dim, pool.block_tokens, is_bfloat16),
                prompt_loops.attend(*shape, is_bfloat16),
            )
        else:
            self._reference = ReferenceAttention(pool, num_heads, windows=windows)
        self.tile_keys = prompt_loops.TILE_KEYS
        self.tile_bytes = prompt_loops.tile_bytes(pool.kv_heads, dim, pool.data.itemsize)
        self._room = torch.empty(0, dtype=torch.uint8)

    def room(self, tiles: int) -> Tensor:
        """A buffer for ``tiles`` of packed keys and values. It is kept: fresh memory costs more."""
        needed = tiles * self.tile_bytes
        if needed > _MOST_PACKED_BYTES:
            return torch.empty(needed, dtype=torch.uint8)
        if len(self._room) < needed:
            self._room = torch.empty(min(_MOST_PACKED_BYTES, 2 * needed), dtype=torch.uint8)
        return self._room

    def chunk_groups(self, batch: PackedBatch) -> list[range]:
        """Rows of the chunks that compiled loops compute, in groups that are packed together."""
        if self._reference is not None:
            return []
        groups, left = list[range](), 0
        most = _MOST_PACKED_BYTES // self.tile_bytes
        for row in range(batch.decodes, len(batch.query_tokens)):
            tiles = -(-int(batch.context_tokens[row]) // self.tile_keys)
            if not groups or tiles > left:
                groups.append(range(row, row))
                left = most
            groups[-1] = range(groups[-1].start, row + 1)
            left -= tiles
        return groups

    def prepare(self, batch: PackedBatch) -> "NumbaStep":
        """See ``AttentionBackend``."""
        chunks = None
        if batch.decodes < len(batch.query_tokens) and self._reference is not None:
            chunks = self._reference.prepare(batch, chunks_only=True)
        return NumbaStep(self, batch, chunks)


class Work:
    """A step's attention in layers with the same window; owns the data of its jobs.

    Decodes are cut into spans, and the results of cut rows are merged. Prompt chunks are packed
    into tiles, and then cut by heads and tokens.
    """

    def __init__(
        self, backend: NumbaAttention, batch: PackedBatch, window: int, layers: int = 1
    ) -> None:
        """``layers``: number of layers that hold partial results of decodes at once."""
        at = backend.fields
        spans, merged = backend.cut(batch.context_tokens[: batch.decodes], window)
        partials = int(merged[-1, 2]) if len(merged) else 0
        width = backend.pool.data.shape[-1] + 2
        self.partial = np.empty((layers, partials, backend.heads, width), np.float32)
        self.decoded_keys = int((spans[:, 2] - spans[:, 1]).sum())
        table, slots = np.ascontiguousarray(batch.block_table), np.ascontiguousarray(batch.slots)
        self._kept: list[object] = [spans, merged, table, slots]
        shared = {
            at.slots: slots.ctypes.data,
            at.table: table.ctypes.data,
            at.table_stride: table.shape[1],
            at.partial: self.partial.ctypes.data,
            at.merged: merged.ctypes.data,
            at.window: window,
        }
        attend, merge, *of_chunks = backend.tasks
        self.jobs = [
            (attend, shared | {PARTS: len(spans), at.parts: spans.ctypes.data}),
            (merge, shared | {PARTS: len(merged)}),
        ]
        """Tasks with the values of their jobs' fields. Chunks add two tasks per group, if there are
        any."""
        for rows in backend.chunk_groups(batch):
            chunks, tiles, cut = backend.cut_chunks(
                batch.query_tokens,
                batch.context_tokens,
                rows,
                window,
                backend.heads,
                backend.tile_bytes,
            )
            room = backend.room(len(tiles))
            self._kept += (chunks, tiles, cut, room)
            shared |= {at.chunks: chunks.ctypes.data, at.packed: room.data_ptr()}
            for task, parts in zip(of_chunks, (tiles, cut), strict=True):
                fields = {PARTS: len(parts), at.parts: parts.ctypes.data}
                self.jobs.append((task, shared | fields))


class NumbaStep:
    """Attention of one step. Its jobs are made once for all layers."""

    def __init__(
        self, backend: NumbaAttention, batch: PackedBatch, chunks: ReferenceStep | None
    ) -> None:
        """``chunks``: computes prompt chunks if compiled loops do not."""
        self._backend = backend
        self._decodes = batch.decodes
        self._chunks = chunks
        self._chunk_slots = torch.from_numpy(batch.slots[batch.decodes :])
        self._work = {window: Work(backend, batch, window) for window in set(backend.windows)}
        self._jobs = {window: self._made(work) for window, work in self._work.items()}

    def _made(self, work: Work) -> list[tuple[TeamTask, Job, int]]:
        """Tasks with their jobs and the number of threads that each uses."""
        made, (attend, merge, *_) = [], self._backend.tasks
        for task, fields in work.jobs:
            job = np.zeros(FIRST_ARGUMENT + len(self._backend.fields), np.int64)
            for field, value in fields.items():
                job[field] = value
            is_small = task is attend and work.decoded_keys < _WORTH_A_TEAM_KEYS
            threads = 1 if task is merge or is_small else torch.get_num_threads()
            if job[PARTS]:
                made.append((task, job, threads if job[PARTS] > 1 else 1))
        return made

    def attend(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        """See ``AttentionStep``. Raises ``ValueError`` for a dtype other than the pool's."""
        backend, at = self._backend, self._backend.fields
        if not queries.dtype == keys_values.dtype == backend.pool.data.dtype:
            raise ValueError(f"expected the pool's {backend.pool.data.dtype}, got {queries.dtype}")
        queries, keys_values = _heads_together(queries), _heads_together(keys_values)
        out = torch.empty(queries.shape, dtype=queries.dtype)
        for task, job, threads in self._jobs[backend.windows[layer]]:
            job[at.queries], job[at.query_stride] = queries.data_ptr(), queries.stride(0)
            job[at.new], job[at.new_stride] = keys_values.data_ptr(), keys_values.stride(0)
            job[at.pages], job[at.out] = backend.pages[layer], out.data_ptr()
            task.run(job, threads)
        if self._chunks is not None:
            slots = backend.pool.data[layer].flatten(0, 1)
            slots.index_copy_(0, self._chunk_slots, keys_values[self._decodes :])
            out[self._decodes :] = self._chunks.attend_stored(layer, queries)
        return out


def _heads_together(tensor: Tensor) -> Tensor:
    """``tensor`` [tokens, heads, dim] with each token's values contiguous; may be a copy."""
    _, heads, dim = tensor.shape
    together = tensor.stride(2) == 1 and (heads == 1 or tensor.stride(1) == dim)
    return tensor if together else tensor.contiguous()
