"""Decodes on the CPU straight from the pool's pages, compiled by numba.

The reference copies every row's pages, padded to the longest row, before it attends: twice the
memory traffic, and more for short rows next to a long one. Here each row reads its own pages once,
and long rows are cut and spread over the threads (``attention_loops``). Prompt chunks, which are
bound by arithmetic, use the reference.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from worker.attention.paged import KVPool, PackedBatch
from worker.attention.reference import ReferenceAttention, ReferenceStep
from worker.cpu_kernels.compiled import compiler_problem
from worker.cpu_kernels.team import FIRST_ARGUMENT, PARTS, Job

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
        from worker.cpu_kernels import attention_loops

        is_bfloat16, dim = pool.data.dtype == torch.bfloat16, pool.data.shape[-1]
        self.pool = pool
        self.heads = num_heads
        self.windows = tuple(windows) or (0,) * len(pool.data)
        self.pages = [layer.data_ptr() for layer in pool.data]
        self.loops = attention_loops
        self.attend = attention_loops.attend(
            num_heads, pool.kv_heads, dim, pool.block_tokens, is_bfloat16
        )
        self.merge = attention_loops.merge(num_heads, dim, is_bfloat16)
        self.cut = attention_loops.spans()
        self._chunks = ReferenceAttention(pool, num_heads, windows=windows)

    def prepare(self, batch: PackedBatch) -> "NumbaStep":
        """See ``AttentionBackend``."""
        chunks = None
        if batch.decodes < len(batch.query_tokens):
            chunks = self._chunks.prepare(batch, chunks_only=True)
        return NumbaStep(self, batch, chunks)


class Spans:
    """What decodes of a batch read, cut into parts of jobs, for layers with one window. Owns what
    the jobs are given."""

    def __init__(
        self, backend: NumbaAttention, batch: PackedBatch, window: int, layers: int = 1
    ) -> None:
        """``layers``: how many have partial results at a time."""
        self.parts, self.merged = backend.cut(batch.context_tokens[: batch.decodes], window)
        self._table = np.ascontiguousarray(batch.block_table)
        self._slots = np.ascontiguousarray(batch.slots)
        partials = int(self.merged[-1, 2]) if len(self.merged) else 0
        width = backend.pool.data.shape[-1] + 2
        self.partial = np.empty((layers, partials, backend.heads, width), np.float32)
        at = backend.loops.AT
        self.fields: dict[int, int] = {
            at.slots: self._slots.ctypes.data,
            at.table: self._table.ctypes.data,
            at.table_stride: self._table.shape[1],
            at.parts: self.parts.ctypes.data,
            at.partial: self.partial.ctypes.data,
            at.merged: self.merged.ctypes.data,
        }
        """Values of a job's fields."""


class NumbaStep:
    """Attention of one step: its decodes are cut into jobs for all layers."""

    def __init__(
        self, backend: NumbaAttention, batch: PackedBatch, chunks: ReferenceStep | None
    ) -> None:
        self._backend = backend
        self._rows = batch.decodes
        self._chunks = chunks
        self._chunk_slots = torch.from_numpy(batch.slots[batch.decodes :])
        windows = set(backend.windows) if self._rows else ()
        self._spans = {window: Spans(backend, batch, window) for window in windows}
        self._jobs = {window: self._made(spans) for window, spans in self._spans.items()}

    def _made(self, spans: "Spans") -> tuple[Job, Job, int]:
        """The jobs of these spans and of the rows that are cut, and how many threads the first is
        worth."""
        at, jobs = self._backend.loops.AT, []
        for count in (len(spans.parts), len(spans.merged)):
            job = np.zeros(FIRST_ARGUMENT + len(at), np.int64)
            job[PARTS], job[at.job] = count, job.ctypes.data
            for field, value in spans.fields.items():
                job[field] = value
            jobs.append(job)
        keys = int((spans.parts[:, 2] - spans.parts[:, 1]).sum())
        is_worth_it = len(spans.parts) > 1 and keys >= _WORTH_A_TEAM_KEYS
        return jobs[0], jobs[1], torch.get_num_threads() if is_worth_it else 1

    def attend(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        """See ``AttentionStep``."""
        if self._chunks is None:
            return self._decoded(layer, queries, keys_values)
        slots = self._backend.pool.data[layer].flatten(0, 1)
        slots.index_copy_(0, self._chunk_slots, keys_values[self._rows :])
        chunks = self._chunks.attend_stored(layer, queries)
        if not self._rows:
            return chunks
        return torch.cat((self._decoded(layer, queries, keys_values), chunks))

    def _decoded(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        """Store the decodes' ``keys_values`` and attend: results [decodes, heads, head_dim]. Raises
        ``ValueError`` for a type that is not the pool's."""
        backend, at = self._backend, self._backend.loops.AT
        if not queries.dtype == keys_values.dtype == backend.pool.data.dtype:
            raise ValueError(f"expected {backend.pool.data.dtype} as in the pool: {queries.dtype}")
        queries, keys_values = _heads_together(queries), _heads_together(keys_values)
        out = torch.empty((self._rows, *queries.shape[1:]), dtype=queries.dtype)
        job, merging, threads = self._jobs[backend.windows[layer]]
        job[at.queries], job[at.query_stride] = queries.data_ptr(), queries.stride(0)
        job[at.new], job[at.new_stride] = keys_values.data_ptr(), keys_values.stride(0)
        job[at.pages], job[at.out] = backend.pages[layer], out.data_ptr()
        backend.attend.run(job, threads)
        if merging[PARTS]:
            merging[at.out] = out.data_ptr()
            backend.merge.run(merging, 1)
        return out


def _heads_together(tensor: Tensor) -> Tensor:
    """``tensor`` [tokens, heads, dim] with each token's values contiguous; may be a copy."""
    _, heads, dim = tensor.shape
    together = tensor.stride(2) == 1 and (heads == 1 or tensor.stride(1) == dim)
    return tensor if together else tensor.contiguous()
