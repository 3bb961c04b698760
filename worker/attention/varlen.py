"""Attention by ``torch.nn.attention.varlen.varlen_attn`` over the pool's pages. CUDA only.

Optional: torch before 2.12 has no ``block_table``, and the kernel behind it sets conditions of its
own (FlashAttention 2 takes pages of 256 tokens only). It is therefore tried before it is used
(``worker.attention.trial``).
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import Tensor

from worker.attention.paged import KVPool, PackedBatch
from worker.pinned import pack_int32, upload

_NEEDED = frozenset({"window_size", "enable_gqa", "seqused_k", "block_table", "num_splits"})


def varlen_problem() -> str | None:
    """Why this torch's ``varlen_attn`` cannot be used, or None when it can."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen"
    missing = _NEEDED - inspect.signature(varlen_attn).parameters.keys()
    if missing:
        return f"varlen_attn of torch {torch.__version__} has no {', '.join(sorted(missing))}"
    return None


class VarlenAttention:
    """An ``AttentionBackend``. Raises ``ImportError`` that says what this torch lacks."""

    def __init__(
        self,
        pool: KVPool,
        num_heads: int,
        *,
        windows: Sequence[int] = (),
        invariant: bool = False,
    ) -> None:
        """See ``TritonAttention``; ``invariant`` keeps the keys of a row in one program."""
        problem = varlen_problem()
        if problem is not None:
            raise ImportError(problem)
        from torch.nn.attention.varlen import varlen_attn

        self._attend = cast(Callable[..., Tensor], varlen_attn)
        self._pool = pool
        self._grouped = num_heads != pool.kv_heads
        self._windows = tuple(windows)
        self._splits = 1 if invariant else None

    def prepare(self, batch: PackedBatch) -> "VarlenStep":
        """See ``AttentionBackend``."""
        rows = len(batch.query_tokens)
        starts, contexts, table = pack_int32(
            (
                np.concatenate(([0], np.cumsum(batch.query_tokens))),
                batch.context_tokens,
                batch.block_table,
            ),
            self._pool.device,
        )
        return VarlenStep(
            self,
            _Rows(
                starts,
                contexts,
                table.view(rows, -1) if batch.table_on_device is None else batch.table_on_device,
                int(batch.query_tokens.max()),
                int(batch.context_tokens.max()),
            ),
            upload(batch.slots, self._pool.device),
        )

    def decode_step(
        self, slots: Tensor, table: Tensor, contexts: Tensor, most_keys: int
    ) -> "VarlenStep":
        """See ``TritonAttention.decode_step``."""
        starts = torch.arange(len(contexts) + 1, dtype=torch.int32, device=self._pool.device)
        return VarlenStep(self, _Rows(starts, contexts, table, 1, most_keys), slots)

    def run(self, layer: int, rows: "_Rows", slots: Tensor, queries: Tensor, new: Tensor) -> Tensor:
        """Store ``new`` keys and values, then attend; see ``AttentionStep``."""
        data = self._pool.data[layer]
        data.flatten(0, 1).index_copy_(0, slots, new)
        keys, values = data.chunk(2, dim=2)
        window = self._windows[layer] if self._windows else 0
        return self._attend(
            queries,
            keys,
            values,
            rows.starts,
            None,
            rows.most_queries,
            rows.most_keys,
            # Keys to the left of a query, not counting its own.
            window_size=(window - 1 if window else -1, 0),
            enable_gqa=self._grouped,
            seqused_k=rows.contexts,
            block_table=rows.table,
            num_splits=self._splits,
        )


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of a step, int32: ``starts`` [rows + 1], ``contexts`` [rows], ``table`` [rows, n]."""

    starts: Tensor
    contexts: Tensor
    table: Tensor
    most_queries: int
    most_keys: int


class VarlenStep:
    """See ``AttentionStep``."""

    def __init__(self, backend: VarlenAttention, rows: _Rows, slots: Tensor) -> None:
        self._backend = backend
        self._rows = rows
        self._slots = slots

    def attend(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        """See ``AttentionStep``."""
        return self._backend.run(layer, self._rows, self._slots, queries, keys_values)
