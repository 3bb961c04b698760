"""Loads blocks from disk into blocks of the pool that are reserved for them."""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import starmap, takewhile

from worker.kv_disk.background import Background
from worker.kv_disk.block_store import BlockStore
from worker.kv_disk.copies import KVMemory

_BATCH_BYTES = 64 * 2**20
_READERS = 4
_LARGE_BYTES = 2**18
"""Bytes of a block from which several threads read and check blocks faster than one."""


@dataclass(slots=True)
class LoadCounts:
    """Counters, written by the loader's thread. ``seconds``: all loading time, with copies."""

    blocks: int = 0
    seconds: float = 0.0
    missed: int = 0
    """Blocks that were thought to be on disk but could not be read."""


@dataclass(slots=True, eq=False)
class Load:
    """Blocks to load: ``hashes[i]`` into ``blocks[i]``. The first ``loaded`` are there already."""

    hashes: list[bytes]
    blocks: list[int]
    loaded: int = 0


class Loader:
    """Loads blocks, and calls ``done(load)`` on its own thread, exactly once per load."""

    def __init__(
        self,
        store: BlockStore,
        memory: KVMemory,
        background: Background,
        done: Callable[[Load], None],
    ) -> None:
        self.counts = LoadCounts()
        self._store = store
        self._memory = memory
        self._background = background
        self._done = done
        batch = max(1, _BATCH_BYTES // memory.format.block_bytes)
        self._staging = memory.staging(batch)
        is_large = memory.format.block_bytes >= _LARGE_BYTES
        self._readers = ThreadPoolExecutor(_READERS, "tidegate-kv-read") if is_large else None

    def block_s(self) -> float:
        """Mean seconds per block so far; 0 until measured."""
        counts = self.counts
        return counts.seconds / counts.blocks if counts.blocks else 0.0

    def submit(self, load: Load) -> None:
        self._background.submit(lambda: self._run(load))

    def close(self, grace_s: float) -> None:
        self._background.close(grace_s)
        if self._readers is not None:
            self._readers.shutdown(wait=False, cancel_futures=True)

    def _run(self, load: Load) -> None:
        started = time.perf_counter()
        try:
            while load.loaded < len(load.hashes):
                count = self._read_batch(load)
                if not count:
                    self.counts.missed += len(load.hashes) - load.loaded
                    break
                first = load.loaded
                self._memory.copy_in(self._staging, load.blocks[first : first + count])
                load.loaded += count
            self._store.touch(load.hashes[: load.loaded])
            self.counts.blocks += load.loaded
            self.counts.seconds += time.perf_counter() - started
        finally:
            self._done(load)

    def _read_batch(self, load: Load) -> int:
        """Read the next blocks into the staging rows; returns the number before the first miss."""
        hashes = load.hashes[load.loaded : load.loaded + len(self._staging)]
        rows = zip(hashes, self._staging, strict=False)
        if self._readers is None:
            return sum(1 for _ in takewhile(bool, starmap(self._store.read, rows)))
        reads = [self._readers.submit(self._store.read, *row) for row in rows]
        # All are waited for: one left behind a miss would write into the rows of the next load.
        wait(reads)
        return sum(1 for _ in takewhile(Future[bool].result, reads))
