"""Computes decodes by ``tiles``: makes the jobs of each step and runs them on torch's threads."""

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch
from torch import Tensor

from worker.attention.paged import KVPool, PackedBatch
from worker.cpu_kernels.team import FIRST_ARGUMENT, PARTS, Job
from worker.cpu_kernels.tiles import AT, TileArguments

_WORTH_A_TEAM_KEYS: Final = 128
"""Fewest keys of all rows for several threads: fewer are done before another thread begins."""


def fits(pool: KVPool) -> bool:
    """Whether heads are made of whole vectors; False with numba's JIT off, which has no vectors."""
    from numba import config

    dim, vector_bytes = pool.data.shape[-1], 64
    return not getattr(config, "DISABLE_JIT", 0) and dim * pool.data.itemsize % vector_bytes == 0


class TileDecodes:
    """The decodes of steps over one pool, for which ``fits`` is true."""

    def __init__(self, pool: KVPool, num_heads: int, windows: Sequence[int]) -> None:
        """``windows``: keys that a query of each layer sees, 0 for all."""
        from worker.cpu_kernels import tile_loops

        is_bfloat16 = pool.data.dtype == torch.bfloat16
        dim = pool.data.shape[-1]
        self.pool = pool
        self.heads = num_heads
        self.windows = windows
        self.attend = tile_loops.attend(
            num_heads, pool.kv_heads, dim, pool.block_tokens, is_bfloat16
        )
        self.merge = tile_loops.merge(num_heads, dim, is_bfloat16)
        self.spans = tile_loops.spans()
        self.pages = [layer.data_ptr() for layer in pool.data]

    def prepare(self, batch: PackedBatch) -> "TileStep":
        """Cut the step's decodes into jobs for all layers; there must be at least one decode."""
        return TileStep(self, batch)


class TileStep:
    """The decodes of one step."""

    def __init__(self, backend: TileDecodes, batch: PackedBatch) -> None:
        self._backend = backend
        self._rows = batch.decodes
        self._batch = batch  # kept, like the arrays below: jobs hold their addresses
        self._kept: list[object] = []
        self._jobs = {window: self._job(window) for window in set(backend.windows)}

    def _job(self, window: int) -> tuple[Job, bool, int]:
        """The job of the layers with this window, whether rows are cut, and how many threads."""
        batch, backend = self._batch, self._backend
        contexts = batch.context_tokens[: self._rows]
        parts, merged = backend.spans(contexts, window)
        partial_results = int(merged[-1, 2]) if len(merged) else 0
        width = backend.pool.data.shape[-1] + 2
        partial = np.empty((partial_results, backend.heads, width), np.float32)
        job = np.zeros(FIRST_ARGUMENT + len(AT), np.int64)
        table = np.ascontiguousarray(batch.block_table)
        slots = np.ascontiguousarray(batch.slots)
        self._kept += [parts, merged, partial, table, slots]
        job[PARTS] = len(parts)
        job[FIRST_ARGUMENT:] = TileArguments(
            job=job.ctypes.data,
            queries=0,
            query_stride=0,
            new=0,
            new_stride=0,
            pages=0,
            out=0,
            slots=slots.ctypes.data,
            table=table.ctypes.data,
            table_stride=table.shape[1],
            parts=parts.ctypes.data,
            partial=partial.ctypes.data,
            merged=merged.ctypes.data,
            merged_rows=len(merged),
        )
        keys = int((parts[:, 2] - parts[:, 1]).sum())
        is_worth_it = len(parts) > 1 and keys >= _WORTH_A_TEAM_KEYS
        return job, bool(len(merged)), torch.get_num_threads() if is_worth_it else 1

    def attend(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        """Store the decodes' ``keys_values`` and attend: results [decodes, heads, head_dim]. Raises
        ``ValueError`` for a type that is not the pool's."""
        backend = self._backend
        if not queries.dtype == keys_values.dtype == backend.pool.data.dtype:
            raise ValueError(f"expected {backend.pool.data.dtype} as in the pool: {queries.dtype}")
        queries, keys_values = _heads_together(queries), _heads_together(keys_values)
        out = torch.empty((self._rows, *queries.shape[1:]), dtype=queries.dtype)
        job, is_cut, threads = self._jobs[backend.windows[layer]]
        job[AT.queries], job[AT.query_stride] = queries.data_ptr(), queries.stride(0)
        job[AT.new], job[AT.new_stride] = keys_values.data_ptr(), keys_values.stride(0)
        job[AT.pages], job[AT.out] = backend.pages[layer], out.data_ptr()
        backend.attend.run(job, threads)
        if is_cut:
            backend.merge.run(job, 1)
        return out


def _heads_together(tensor: Tensor) -> Tensor:
    """``tensor`` [tokens, heads, dim] with each token's values contiguous; may be a copy."""
    _, heads, dim = tensor.shape
    together = tensor.stride(2) == 1 and (heads == 1 or tensor.stride(1) == dim)
    return tensor if together else tensor.contiguous()
