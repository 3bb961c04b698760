"""FlashInfer's own decodes, to hold ours against: the worker does not use them.

They want the host to plan every batch, which a recorded decode has no host for
(``worker.attention.flashinfer_backend``).
"""

from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from worker.attention.flashinfer_backend import chunks_of, flashinfer_problem
from worker.attention.paged import KVPool, PackedBatch
from worker.pinned import upload

_SCRATCH_BYTES: Final = 128 * 2**20


class FlashInferDecodes:
    """An ``AttentionBackend`` for steps of nothing but decodes, that see all keys."""

    def __init__(self, pool: KVPool, num_heads: int, *, tensor_cores: bool) -> None:
        """Raises ``ImportError`` where FlashInfer cannot be used."""
        problem = flashinfer_problem()
        if problem is not None:
            raise ImportError(problem)
        import flashinfer

        self._pool = pool
        self._heads = num_heads
        scratch = torch.zeros(_SCRATCH_BYTES, dtype=torch.uint8, device=pool.device)
        self._wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            scratch, "NHD", use_tensor_cores=tensor_cores
        )

    def prepare(self, batch: PackedBatch) -> "_Step":
        """See ``AttentionBackend``. A step is valid until the next one."""
        assert batch.decodes == len(batch.query_tokens), "a row has more than one token"
        page = self._pool.block_tokens
        # To FlashInfer a decode is paged as a chunk of one token is.
        paged = chunks_of(replace(batch, decodes=0), page, self._pool.device)
        self._wrapper.plan(
            paged.first_pages,
            paged.pages,
            paged.last_page_tokens,
            self._heads,
            self._pool.kv_heads,
            self._pool.data.shape[-1],
            page,
            q_data_type=self._pool.data.dtype,
        )
        return _Step(self, upload(batch.slots, self._pool.device))

    def run(self, layer: int, slots: Tensor, queries: Tensor, new: Tensor) -> Tensor:
        """Store ``new`` keys and values, then attend; see ``AttentionStep``."""
        data = self._pool.data[layer]
        data.flatten(0, 1).index_copy_(0, slots, new)
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        self._wrapper.run(queries, data.chunk(2, dim=2), out=out)
        return out


class _Step:
    """See ``AttentionStep``."""

    def __init__(self, backend: FlashInferDecodes, slots: Tensor) -> None:
        self._backend = backend
        self._slots = slots

    def attend(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        """See ``AttentionStep``."""
        return self._backend.run(layer, self._slots, queries, keys_values)
