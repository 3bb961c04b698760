"""Decodes on the CPU straight from the pool's pages, compiled by numba.

The reference copies every row's pages, padded to the longest row, before it attends: twice the
memory traffic, and more for short rows next to a long one. Here each row reads its own pages once:
by ``tiles``, with long rows cut and spread over the threads, or, if heads are not whole vectors,
front to back on one thread with the softmax carried along (Milakov and Gimelshein 2018). Prompt
chunks, which are bound by arithmetic, use the reference.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.attention.paged import KVPool, PackedBatch
from worker.attention.reference import ReferenceAttention, ReferenceStep
from worker.cpu_kernels.compiled import Function, compiled, compiler_problem
from worker.cpu_kernels.team import FIRST_ARGUMENT, PARTS, Job
from worker.cpu_kernels.tiles import AT, TileArguments

_WORTH_A_TEAM_KEYS: Final = 128
"""Fewest keys of all rows for several threads: fewer are done before another thread begins."""


def fits(pool: KVPool) -> bool:
    """Whether heads are whole vectors; False with numba's JIT off, which has no vectors."""
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
        self._pool = pool
        self._chunks = ReferenceAttention(pool, num_heads, windows=windows)
        self._windows = tuple(windows) or (0,) * len(pool.data)
        self._dtype = pool.data.dtype
        self._pages = [_as_numbers(layer) for layer in pool.data]
        dim = pool.data.shape[-1]
        self._tiles = TileDecodes(pool, num_heads, self._windows) if fits(pool) else None
        if self._tiles is None:
            self._kernel = _kernel(
                num_heads, pool.kv_heads, dim, pool.block_tokens, self._dtype == torch.bfloat16
            )

    def prepare(self, batch: PackedBatch) -> "NumbaStep | TiledStep":
        """See ``AttentionBackend``."""
        chunks = None
        if batch.decodes < len(batch.query_tokens):
            chunks = self._chunks.prepare(batch, chunks_only=True)
        if self._tiles is None:
            return NumbaStep(self, batch, chunks)
        decodes = self._tiles.prepare(batch) if batch.decodes else None
        return TiledStep(self._pool, batch, decodes, chunks)

    def decode(
        self, layer: int, batch: PackedBatch, queries: Tensor, keys_values: Tensor
    ) -> NDArray[np.float32]:
        """Store all of the step's ``keys_values``; attend the decodes: [decodes, heads, dim]."""
        out = np.empty((batch.decodes, *queries.shape[1:]), np.float32)
        self._kernel(
            _as_numbers(queries),
            _as_numbers(keys_values),
            self._pages[layer],
            batch.slots,
            batch.block_table,
            batch.context_tokens,
            self._windows[layer],
            out,
        )
        return out

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype


class NumbaStep:
    """Attention of one step."""

    def __init__(
        self, backend: NumbaAttention, batch: PackedBatch, chunks: ReferenceStep | None
    ) -> None:
        self._backend = backend
        self._batch = batch
        self._chunks = chunks

    def attend(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        """See ``AttentionStep``."""
        decoded = torch.from_numpy(self._backend.decode(layer, self._batch, queries, keys_values))
        decoded = decoded.to(self._backend.dtype)
        if self._chunks is None:
            return decoded
        return torch.cat((decoded, self._chunks.attend_stored(layer, queries)))


class TiledStep:
    """Attention of one step with decodes by ``tiles``."""

    def __init__(
        self,
        pool: KVPool,
        batch: PackedBatch,
        decodes: TileStep | None,
        chunks: ReferenceStep | None,
    ) -> None:
        self._pool = pool
        self._first = batch.decodes
        self._slots = torch.from_numpy(batch.slots[batch.decodes :])
        self._decodes = decodes
        self._chunks = chunks

    def attend(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        """See ``AttentionStep``."""
        if self._chunks is None:
            assert self._decodes is not None
            return self._decodes.attend(layer, queries, keys_values)
        slots = self._pool.data[layer].flatten(0, 1)
        slots.index_copy_(0, self._slots, keys_values[self._first :])
        chunks = self._chunks.attend_stored(layer, queries)
        if self._decodes is None:
            return chunks
        return torch.cat((self._decodes.attend(layer, queries, keys_values), chunks))


def _as_numbers(tensor: Tensor) -> NDArray[np.generic]:
    """A numpy view of ``tensor``; bfloat16, which numpy lacks, as its bits in uint16."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    numbers: NDArray[np.generic] = tensor.numpy()
    return numbers


@cache
def _kernel(heads: int, kv_heads: int, dim: int, block_tokens: int, is_bfloat16: bool) -> Function:
    """Compiled for one shape: the innermost loops are then straight vector code.

    Exponentials of x ≤ 0 are made a page at a time, which libm's cannot do: e^x = 2^n · 2^r with n
    whole and r within ½ of 0; the bits of 2^n are n + 127 as a float's exponent, and Taylor's seven
    terms give 2^r to the last bit but one.
    """
    shared = heads // kv_heads
    scale = np.float32(1 / math.sqrt(dim))
    log2_e, ln_2 = np.float32(1 / math.log(2)), np.float32(math.log(2))

    kind = "u2" if is_bfloat16 else "f4"
    given = f"{kind}[:, :, :], {kind}[:, :, :], {kind}[:, :, :, ::1]"

    @compiled(
        f"({given}, i8[:], i8[:, :], i8[:], i8, f4[:, :, ::1])",
        *(heads, kv_heads, dim, block_tokens, is_bfloat16),
    )
    def attend(  # type: ignore[no-untyped-def]
        queries, new, pages, slots, table, contexts, window, out
    ):
        for token in range(len(slots)):
            page, offset = slots[token] // block_tokens, slots[token] % block_tokens
            for head in range(2 * kv_heads):
                for d in range(dim):
                    pages[page, offset, head, d] = new[token, head, d]
        scores = np.zeros((heads, block_tokens), np.float32)
        flat = scores.ravel()
        powers = np.empty(heads * block_tokens, np.float32)
        power_bits = powers.view(np.int32)
        query = np.empty((heads, dim), np.float32)
        query_bits = query.view(np.uint32)
        total = np.empty((heads, dim), np.float32)
        highest = np.empty(heads, np.float32)
        weight = np.empty(heads, np.float32)
        wide = np.empty((2 * kv_heads, block_tokens, dim), np.float32)
        wide_bits = wide.view(np.uint32)
        for row in range(len(out)):
            keys = contexts[row]
            first_key = max(0, keys - window) if window else 0
            for head in range(heads):
                highest[head] = -np.inf
                weight[head] = 0
                for d in range(dim):
                    total[head, d] = 0
                    if is_bfloat16:
                        query_bits[head, d] = np.uint32(queries[row, head, d]) << np.uint32(16)
                    else:
                        query[head, d] = queries[row, head, d]
                for d in range(dim):
                    query[head, d] *= scale
            for block in range(
                first_key // block_tokens, (keys + block_tokens - 1) // block_tokens
            ):
                page = pages[table[row, block]]
                begin = max(0, first_key - block * block_tokens)
                end = min(block_tokens, keys - block * block_tokens)
                if is_bfloat16:
                    for t in range(begin, end):
                        for head in range(2 * kv_heads):
                            for d in range(dim):
                                bits = np.uint32(page[t, head, d]) << np.uint32(16)
                                wide_bits[head, t, d] = bits
                for t in range(begin, end):
                    for head in range(heads):
                        key = wide[head // shared, t] if is_bfloat16 else page[t, head // shared]
                        score = np.float32(0)
                        for d in range(dim):
                            score += query[head, d] * key[d]
                        scores[head, t] = score
                for head in range(heads):
                    top = highest[head]
                    for t in range(begin, end):
                        top = max(top, scores[head, t])
                    if top > highest[head]:
                        shrink = np.exp(highest[head] - top)
                        highest[head] = top
                        weight[head] *= shrink
                        for d in range(dim):
                            total[head, d] *= shrink
                    for t in range(begin, end):
                        scores[head, t] -= top
                for i in range(len(flat)):
                    z = max(flat[i] * log2_e, np.float32(-126))
                    n = np.floor(z + np.float32(0.5))
                    r = (z - n) * ln_2
                    power_bits[i] = (np.int32(n) + np.int32(127)) << np.int32(23)
                    p = np.float32(1 / 720)
                    p = p * r + np.float32(1 / 120)
                    p = p * r + np.float32(1 / 24)
                    p = p * r + np.float32(1 / 6)
                    p = p * r + np.float32(0.5)
                    p = p * r + np.float32(1)
                    flat[i] = p * r + np.float32(1)
                for i in range(len(flat)):
                    flat[i] *= powers[i]
                for head in range(heads):
                    for t in range(begin, end):
                        weight[head] += scores[head, t]
                for head in range(heads):
                    at = kv_heads + head // shared
                    for t in range(begin, end):
                        share = scores[head, t]
                        value = wide[at, t] if is_bfloat16 else page[t, at]
                        for d in range(dim):
                            total[head, d] += share * value[d]
            for head in range(heads):
                for d in range(dim):
                    out[row, head, d] = total[head, d] / weight[head]

    return attend
