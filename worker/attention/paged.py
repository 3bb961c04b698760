"""The KV pool in memory, and the layout of a step's rows in a packed batch.

::

    pool.data [layers, blocks, block_tokens, 2 * kv_heads, head_dim]
                                             keys first, then values
    slot = block * block_tokens + offset

    packed tokens   d d d d | c c c c c c | c c c c        decodes: one token per row,
    rows            0 1 2 3 |      4      |    5           then chunks of prompts
"""

import math
import mmap
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray


class KVPool:
    """Keys and values of all blocks, allocated once (WK-4)."""

    def __init__(
        self,
        *,
        layers: int,
        blocks: int,
        block_tokens: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.block_tokens = block_tokens
        self.kv_heads = kv_heads
        # Zeros, because a slot that was never written is still gathered and then masked: it may
        # hold any number except NaN. That is why blocks that held NaN are cleared.
        shape = (layers, blocks, block_tokens, 2 * kv_heads, head_dim)
        if device.type == "cpu":
            self.data = _untouched_zeros(shape, dtype)
        else:
            self.data = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def device(self) -> torch.device:
        return self.data.device


def _untouched_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros on the CPU, in pages that the system allocates on first write.

    ``torch.zeros`` writes all pages: a pool would take its memory, and the time to clear it, at
    startup. Raises ``OSError`` or ``OverflowError`` if there is no room.
    """
    nbytes = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=dtype).view(shape)


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """Says where the rows of a step read and write the pool. Host arrays, int64.

    ``query_tokens`` [rows]: tokens that each row computes in this step. The first ``decodes`` rows
    compute one each. ``context_tokens`` [rows]: tokens with KV after this step, including those.
    ``block_table`` [rows, blocks]: padded with one of the row's own blocks, because 0 times NaN is
    NaN and another row may have NaN. ``slots`` [tokens]: where each packed token's KV goes.
    ``table_on_device``: the block table as int32 if it is on the device already; ``block_table``
    then has no columns.
    """

    decodes: int
    query_tokens: NDArray[np.int64]
    context_tokens: NDArray[np.int64]
    block_table: NDArray[np.int64]
    slots: NDArray[np.int64]
    table_on_device: torch.Tensor | None = None


class AttentionStep(Protocol):
    """One step's attention; holds the data that all layers share."""

    def attend(self, layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
        """Store this step's keys and values, then attend causally within each row.

        ``queries`` [tokens, heads, head_dim], ``keys_values`` [tokens, 2 * kv_heads, head_dim]
        (keys first) → [tokens, heads, head_dim].
        """


class AttentionBackend(Protocol):
    """An implementation of attention over one pool."""

    def prepare(self, batch: PackedBatch) -> AttentionStep: ...
