"""FlashInfer's kernels for prompt chunks, our own kernel for decodes, on CUDA only.

FlashInfer is optional. Its kernel is FlashAttention 3 on Hopper chips and FlashAttention 2 on
others. It needs the host to plan each batch, which a recorded decode cannot do. So decodes use
``TritonAttention``, which reads the pool nearly at the device's full bandwidth::

    packed tokens   d d d d | c c c c c c | c c c c
                     Triton |      FlashInfer, planned once per step and window

It uses the pool as it is: keys and values are views with their strides. A kernel is compiled for a
dtype, a head size, and with or without a window, when it is first planned. That takes minutes
unless ``flashinfer-jit-cache`` is installed; kernels are kept in ``~/.cache/flashinfer``.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker.attention.paged import AttentionStep, KVPool, PackedBatch
from worker.attention.triton_backend import TritonAttention
from worker.extras import pip_install
from worker.pinned import upload

DTYPES: Final = (torch.float16, torch.bfloat16)
HEAD_DIMS: Final = (64, 128, 256)
"""Head sizes of both of its kernels. Others would fail only after minutes of compilation."""

_NEEDED: Final = {
    "plan": frozenset({"causal", "window_left", "q_data_type", "seq_lens", "non_blocking"}),
    "run": frozenset({"q", "paged_kv_cache", "out"}),
}
_SCRATCH_BYTES: Final = 128 * 2**20
"""FlashInfer's recommended size for partial results of split keys; it never needs all of it."""
_IN_TURN: Final = 2
"""Wrappers per window: the host plans one while the device still runs the other one's plan."""


class PagedPrefill(Protocol):
    """The part of FlashInfer's ``BatchPrefillWithPagedKVCacheWrapper`` that this module uses."""

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        window_left: int,
        q_data_type: torch.dtype,
        seq_lens: Tensor,
        non_blocking: bool,
    ) -> None: ...

    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor: ...


def flashinfer_problem() -> str | None:
    """Why FlashInfer cannot be used here; None if it can. Imports it, which takes seconds."""
    try:
        import flashinfer
    except ImportError as error:
        if error.name == "flashinfer":
            return f"FlashInfer is not installed: {pip_install('flashinfer')}"
        return f"FlashInfer cannot be imported: {error}"
    wrapper = getattr(flashinfer, "BatchPrefillWithPagedKVCacheWrapper", None)
    version = getattr(flashinfer, "__version__", "of an unknown version")
    if wrapper is None:
        return f"FlashInfer {version} has no BatchPrefillWithPagedKVCacheWrapper"
    for name, needed in _NEEDED.items():
        missing = needed - inspect.signature(getattr(wrapper, name)).parameters.keys()
        if missing:
            return f"{name} of FlashInfer {version} has no {', '.join(sorted(missing))}"
    return None


class FlashInferAttention:
    """An ``AttentionBackend`` whose decodes can be recorded (``decode_step``)."""

    def __init__(self, pool: KVPool, num_heads: int, *, windows: Sequence[int] = ()) -> None:
        """``windows``: keys that a query of each layer sees, 0: all; empty: all keys in all layers.

        Raises ``ImportError`` that names the missing part, and ``ValueError`` for a dtype or head
        size without FlashInfer kernels.
        """
        dtype, dim = pool.data.dtype, pool.data.shape[-1]
        if dtype not in DTYPES or dim not in HEAD_DIMS:
            raise ValueError(
                f"FlashInfer has no kernels for heads of {dim} in {dtype}, only for heads of"
                f" {', '.join(map(str, HEAD_DIMS))} in float16 or bfloat16"
            )
        problem = flashinfer_problem()
        if problem is not None:
            raise ImportError(problem)
        self._pool = pool
        self._heads = num_heads
        self._windows = tuple(windows) or (0,) * len(pool.data)
        self._decodes = TritonAttention(pool, num_heads, windows=windows)
        # The kernels run one after another, so all wrappers can share it.
        scratch = torch.empty(_SCRATCH_BYTES, dtype=torch.uint8, device=pool.device)
        self._turns = {window: _Turns(scratch) for window in set(self._windows)}

    def prepare(self, batch: PackedBatch) -> AttentionStep:
        """See ``AttentionBackend``. A step is valid until the second later step with chunks."""
        decodes = batch.decodes
        if decodes == len(batch.query_tokens):
            return self._decodes.prepare(batch)
        chunks = chunks_of(batch, self._pool.block_tokens, self._pool.device)
        planned = {window: self._plan(window, chunks) for window in self._turns}
        return FlashInferStep(
            self._pool,
            self._decodes.prepare(_decodes_of(batch)) if decodes else None,
            decodes,
            upload(batch.slots[decodes:], self._pool.device),
            [planned[window] for window in self._windows],
        )

    def decode_step(
        self, slots: Tensor, table: Tensor, contexts: Tensor, most_keys: int
    ) -> AttentionStep:
        """See ``TritonAttention.decode_step``."""
        return self._decodes.decode_step(slots, table, contexts, most_keys)

    def _plan(self, window: int, chunks: "Chunks") -> PagedPrefill:
        with self._turns[window].next() as wrapper:
            wrapper.plan(
                chunks.starts,
                chunks.first_pages,
                chunks.pages,
                chunks.last_page_tokens,
                self._heads,
                self._pool.kv_heads,
                self._pool.data.shape[-1],
                self._pool.block_tokens,
                causal=True,
                # Number of keys to the left of a query, without its own.
                window_left=window - 1 if window else -1,
                q_data_type=self._pool.data.dtype,
                seq_lens=chunks.contexts,
                non_blocking=True,
            )
        return wrapper


class FlashInferStep:
    """See ``AttentionStep``: any number of decodes, then at least one chunk."""

    def __init__(
        self,
        pool: KVPool,
        decode_step: AttentionStep | None,
        decodes: int,
        chunk_slots: Tensor,
        planned: Sequence[PagedPrefill],
    ) -> None:
        """``planned`` has one entry per layer."""
        self._pool = pool
        self._decode_step = decode_step
        self._decodes = decodes
        self._chunk_slots = chunk_slots
        self._planned = planned

    def attend(self, layer: int, queries: Tensor, keys_values: Tensor) -> Tensor:
        """See ``AttentionStep``."""
        data, decodes = self._pool.data[layer], self._decodes
        # Store before attending: a row may read pages that another row fills in this step.
        data.flatten(0, 1).index_copy_(0, self._chunk_slots, keys_values[decodes:])
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        if self._decode_step is not None:
            out[:decodes] = self._decode_step.attend(
                layer, queries[:decodes], keys_values[:decodes]
            )
        keys, values = data.chunk(2, dim=2)
        self._planned[layer].run(queries[decodes:], (keys, values), out=out[decodes:])
        return out


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks in FlashInfer's format: int32, on the host except ``pages``.

    ``starts`` [chunks + 1]: where each chunk's tokens begin, and the end. ``pages``: the blocks of
    all chunks, chunk by chunk, from ``first_pages`` [chunks + 1] on. ``last_page_tokens`` [chunks]:
    keys in the last page, at least 1. ``contexts`` [chunks]: number of keys.
    """

    starts: Tensor
    first_pages: Tensor
    pages: Tensor
    last_page_tokens: Tensor
    contexts: Tensor


def chunks_of(batch: PackedBatch, block_tokens: int, device: torch.device) -> Chunks:
    contexts = batch.context_tokens[batch.decodes :]
    counts = -(-contexts // block_tokens)
    first_pages = _bounds(counts)
    rows = np.repeat(np.arange(batch.decodes, len(batch.context_tokens)), counts)
    columns = np.arange(first_pages[-1]) - np.repeat(first_pages[:-1], counts)
    table = batch.table_on_device
    if table is None:
        pages = upload(batch.block_table[rows, columns].astype(np.int32), device)
    else:
        pages = table.reshape(-1)[upload(rows * table.shape[1] + columns, device)]

    def host(array: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(array.astype(np.int32))

    return Chunks(
        starts=host(_bounds(batch.query_tokens[batch.decodes :])),
        first_pages=host(first_pages),
        pages=pages,
        last_page_tokens=host(contexts - (counts - 1) * block_tokens),
        contexts=host(contexts),
    )


def _bounds(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate(([0], np.cumsum(lengths)))


def _decodes_of(batch: PackedBatch) -> PackedBatch:
    """The decodes of ``batch`` alone."""
    decodes = batch.decodes
    return PackedBatch(
        decodes=decodes,
        query_tokens=batch.query_tokens[:decodes],
        context_tokens=batch.context_tokens[:decodes],
        block_table=batch.block_table[:decodes],
        slots=batch.slots[:decodes],
        table_on_device=None if batch.table_on_device is None else batch.table_on_device[:decodes],
    )


class _Turns:
    """Alternates between the wrappers of one window. ``plan`` queues a copy from the wrapper's
    pinned memory and returns: another plan before the copy finishes would change its data.
    """

    def __init__(self, scratch: Tensor) -> None:
        import flashinfer

        self._on_cuda = scratch.device.type == "cuda"
        self._wrappers = [
            cast(PagedPrefill, flashinfer.BatchPrefillWithPagedKVCacheWrapper(scratch, "NHD"))
            for _ in range(_IN_TURN)
        ]
        self._copied: list[torch.cuda.Event | None] = [None] * _IN_TURN
        self._turn = 0

    @contextmanager
    def next(self) -> Iterator[PagedPrefill]:
        """The wrapper to plan within the ``with`` block; the device has copied its last plan."""
        self._turn = (self._turn + 1) % _IN_TURN
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        yield self._wrappers[self._turn]
        if self._on_cuda:
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            self._copied[self._turn] = copied
