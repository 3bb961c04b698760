"""The interfaces of the tier below the engine's KV pool and of the copies between them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from worker.kv_disk.block_file import BlockFormat, Bytes
from worker.scheduler.request import Request


class KVMemory(Protocol):
    """A pool whose blocks threads other than the engine's can copy.

    The caller holds a reference to every block that it passes, so that no step writes to it.
    """

    format: BlockFormat

    def staging(self, blocks: int) -> Bytes:
        """Host memory ``[blocks, block_bytes]`` uint8 that is fast to copy from and to."""

    def copy_out(self, blocks: Sequence[int], staging: Bytes) -> None:
        """Copy blocks of the pool to the first rows of ``staging``. Returns when it is done."""

    def copy_in(self, staging: Bytes, blocks: Sequence[int]) -> None:
        """Copy the first rows of ``staging`` to blocks of the pool. Returns when it is done."""

    def clear(self, blocks: Sequence[int]) -> None:
        """Fill blocks of the pool with zeros, on the engine's thread. Returns when it is done."""


class HostMemory:
    """A pool in ordinary memory, ``[layers, blocks, bytes of a layer's share]``.

    Copies are plain strided copies: a thread pool would compete with the engine for cores.
    """

    def __init__(self, data: NDArray[np.uint8], block_format: BlockFormat) -> None:
        self._data = data
        self.format = block_format

    def staging(self, blocks: int) -> Bytes:
        return np.empty((blocks, self.format.block_bytes), np.uint8)

    def copy_out(self, blocks: Sequence[int], staging: Bytes) -> None:
        for row, block in enumerate(blocks):
            staging[row].reshape(len(self._data), -1)[:] = self._data[:, block]

    def copy_in(self, staging: Bytes, blocks: Sequence[int]) -> None:
        for row, block in enumerate(blocks):
            self._data[:, block] = staging[row].reshape(len(self._data), -1)

    def clear(self, blocks: Sequence[int]) -> None:
        self._data[:, list(blocks)] = 0


@dataclass(frozen=True, slots=True)
class TierStats:
    """Totals since the worker started. ``failures``: files that could not be written or used."""

    saved_blocks: int = 0
    save_ms: float = 0.0
    loaded_blocks: int = 0
    load_ms: float = 0.0
    failures: int = 0


class BlockTier:
    """A tier below the KV pool; this one does nothing. All methods are called on the engine's
    thread and never wait."""

    def attach(self, wake: Callable[[], None]) -> None:
        """Set the callback for results, on any thread."""

    def restore(self, waiting: Sequence[Request], now: float) -> None:
        """Make the next requests in the queue wait for the load of their heads, if it pays off."""

    def keep(self, request: Request) -> None:
        """Save an ending request's blocks."""

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Stop saving and restoring these blocks: their content is invalid."""

    def collect(self, now: float) -> None:
        """Unpin copied blocks, and resume requests whose load has ended."""

    def spill(self) -> None:
        """Save blocks ahead of their eviction, if there is nothing else to save."""

    def stats(self) -> TierStats:
        return TierStats()

    def close(self) -> None:
        """Finish saving, which may take a moment, and unpin all blocks. Idempotent."""
