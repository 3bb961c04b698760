"""Copies between the KV pool and ordinary memory, from which files are written and into which they
are read."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from worker.kv_disk.block_file import BlockFormat, Bytes


class KVMemory(Protocol):
    """A pool whose blocks can be copied by a thread that is not the engine's.

    The caller holds a reference to every block that it names, so that no step writes to it.
    """

    @property
    def format(self) -> BlockFormat: ...

    def staging(self, blocks: int) -> Bytes:
        """Host memory ``[blocks, block_bytes]`` uint8, of a kind that copies fast."""

    def copy_out(self, blocks: Sequence[int], staging: Bytes) -> None:
        """Copy blocks of the pool to the first rows of ``staging``. Returns when it is done."""

    def copy_in(self, staging: Bytes, blocks: Sequence[int]) -> None:
        """Copy the first rows of ``staging`` to blocks of the pool. Returns when it is done."""

    def clear(self, blocks: Sequence[int]) -> None:
        """Fill blocks of the pool with zeros, on the engine's thread. Returns when it is done."""


class HostMemory:
    """A pool in ordinary memory, ``[layers, blocks, bytes of a layer's share]``.

    Copies are plain and strided: a thread pool would compete with the engine for its cores.
    """

    def __init__(self, data: NDArray[np.uint8], block_format: BlockFormat) -> None:
        self._data = data
        self._format = block_format

    @property
    def format(self) -> BlockFormat:
        return self._format

    def staging(self, blocks: int) -> Bytes:
        return np.empty((blocks, self._format.block_bytes), np.uint8)

    def copy_out(self, blocks: Sequence[int], staging: Bytes) -> None:
        for row, block in enumerate(blocks):
            staging[row].reshape(len(self._data), -1)[:] = self._data[:, block]

    def copy_in(self, staging: Bytes, blocks: Sequence[int]) -> None:
        for row, block in enumerate(blocks):
            self._data[:, block] = staging[row].reshape(len(self._data), -1)

    def clear(self, blocks: Sequence[int]) -> None:
        self._data[:, list(blocks)] = 0
