"""Attends on the CPU straight from the pool's pages, compiled by numba.

The reference copies every row's pages, padded to the longest row, before it attends: twice the
memory traffic, and more for short rows next to a long one. Here each decode reads its own pages
once, and long rows are cut and spread over the threads (``attention_loops``). Prompts' chunks are
packed and multiplied in tiles (``prompt_loops``), or left to the reference on a CPU without
AVX-512.
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
"""Fewest keys of all rows for several threads: fewer are done before another thread begins."""
_DTYPES = (torch.float32, torch.bfloat16)


class NumbaAttention:
    """An ``AttentionBackend`` for pools of float32 or bfloat16 on the CPU."""

    def __init__(self, pool: KVPool, num_heads: int, *, windows: Sequence[int] = ()) -> None:
        """``windows``: as of ``ReferenceAttention``. Raises ``ImportError`` without numba,
        ``ValueError`` for another type or device."""
        if (problem := compiler_problem()) is not None:
            raise ImportError(problem)
        if pool.device.type != "cpu" or pool.data.dtype not in _DTYPES:
            raise ValueError(f"it is for float32 and bfloat16 on the CPU, not {pool.data.dtype}")
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
        """What a step does in turn, see ``Work``."""
        self._reference: ReferenceAttention | None = None
        if products_problem() is None:
            self.tasks += (
                prompt_loops.pack(pool.kv_heads, dim, pool.block_tokens, is_bfloat16),
                prompt_loops.attend(*shape, is_bfloat16),
            )
        else:
            self._reference = ReferenceAttention(pool, num_heads, windows=windows)
        self.tile_bytes = prompt_loops.tile_bytes(pool.kv_heads, dim, pool.data.itemsize)
        self._room = torch.empty(0, dtype=torch.uint8)

    def room(self, tiles: int) -> Tensor:
        """Room for ``tiles`` of packed keys and values, kept: fresh memory costs more."""
        if len(self._room) < (needed := tiles * self.tile_bytes):
            self._room = torch.empty(needed, dtype=torch.uint8)
        return self._room

    def prepare(self, batch: PackedBatch) -> "NumbaStep":
        """See ``AttentionBackend``."""
        chunks = None
        if batch.decodes < len(batch.query_tokens) and self._reference is not None:
            chunks = self._reference.prepare(batch, chunks_only=True)
        return NumbaStep(self, batch, chunks)


class Work:
    """What a step's attention does in layers with one window; owns what its jobs are given.

    Decodes are cut into spans, and the results of those that are cut are merged; prompts' chunks
    are packed in tiles, and then cut by heads and tokens.
    """

    def __init__(
        self, backend: NumbaAttention, batch: PackedBatch, window: int, layers: int = 1
    ) -> None:
        """``layers``: how many have partial results of decodes at a time."""
        at = backend.fields
        spans, merged = backend.cut(batch.context_tokens[: batch.decodes], window)
        partials = int(merged[-1, 2]) if len(merged) else 0
        width = backend.pool.data.shape[-1] + 2
        self.partial = np.empty((layers, partials, backend.heads, width), np.float32)
        self.decoded_keys = int((spans[:, 2] - spans[:, 1]).sum())
        rows = batch.query_tokens, batch.context_tokens, batch.decodes
        chunks, tiles, cut = backend.cut_chunks(*rows, window, backend.heads, backend.tile_bytes)
        room = backend.room(len(tiles))
        table, slots = np.ascontiguousarray(batch.block_table), np.ascontiguousarray(batch.slots)
        self._kept = spans, merged, chunks, tiles, cut, room, table, slots
        shared = {
            at.slots: slots.ctypes.data,
            at.table: table.ctypes.data,
            at.table_stride: table.shape[1],
            at.partial: self.partial.ctypes.data,
            at.merged: merged.ctypes.data,
            at.chunks: chunks.ctypes.data,
            at.packed: room.data_ptr(),
            at.window: window,
        }
        self.jobs = [
            shared | {PARTS: len(parts), at.parts: parts.ctypes.data}
            for parts in (spans, merged, tiles, cut)[: len(backend.tasks)]
        ]
        """Values of the fields of jobs, one for each of ``NumbaAttention.tasks``."""


class NumbaStep:
    """Attention of one step, whose jobs are made once for all layers."""

    def __init__(
        self, backend: NumbaAttention, batch: PackedBatch, chunks: ReferenceStep | None
    ) -> None:
        """``chunks``: attends prompts' chunks, where compiled loops do not."""
        self._backend = backend
        self._decodes = batch.decodes
        self._chunks = chunks
        self._chunk_slots = torch.from_numpy(batch.slots[batch.decodes :])
        self._work = {window: Work(backend, batch, window) for window in set(backend.windows)}
        self._jobs = {window: self._made(work) for window, work in self._work.items()}

    def _made(self, work: Work) -> list[tuple[TeamTask, Job, int]]:
        """Tasks with their jobs, and how many threads each is worth."""
        made = []
        for i, (task, fields) in enumerate(zip(self._backend.tasks, work.jobs, strict=True)):
            job = np.zeros(FIRST_ARGUMENT + len(self._backend.fields), np.int64)
            job[self._backend.fields.job] = job.ctypes.data
            for field, value in fields.items():
                job[field] = value
            is_worth_it = i > 1 or (i == 0 and work.decoded_keys >= _WORTH_A_TEAM_KEYS)
            threads = torch.get_num_threads() if is_worth_it and job[PARTS] > 1 else 1
            if job[PARTS]:
                made.append((task, job, threads))
        return made

    def attend(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        """See ``AttentionStep``. Raises ``ValueError`` for a type that is not the pool's."""
        backend, at = self._backend, self._backend.fields
        if not queries.dtype == keys_values.dtype == backend.pool.data.dtype:
            raise ValueError(f"expected {backend.pool.data.dtype} as in the pool: {queries.dtype}")
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
