"""Loads blocks from disk into reserved pool blocks, and saves pool blocks to disk.

Each works in batches on its own thread, so that the engine never waits. Saved blocks return to the
pool before their files are written.
"""

import queue
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import starmap, takewhile
from typing import NamedTuple, Protocol

from worker.kv_disk.base import KVMemory
from worker.kv_disk.block_store import BlockStore
from worker.log import engine_log

Task = Callable[[], None]


class Background(Protocol):
    """Runs tasks one after another in the background. Tests run them directly."""

    def submit(self, task: Task) -> None: ...

    def close(self, grace_s: float) -> None:
        """Accept no more tasks; give the remaining tasks ``grace_s`` seconds. Idempotent."""


class BackgroundThread:
    """A ``Background`` on its own thread."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._closed = False
        self._abandoned = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def submit(self, task: Task) -> None:
        """Run ``task`` on the thread. The first call starts it, because a thread inherits its
        creator's niceness, and a load's niceness would persist."""
        if not self._closed:
            if self._thread.ident is None:
                self._thread.start()
            self._tasks.put(task)

    def close(self, grace_s: float) -> None:
        if not self._closed:
            self._closed = True
            if self._thread.ident is not None:
                self._tasks.put(None)
                self._thread.join(grace_s)
            self._abandoned = True

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None and not self._abandoned:
            try:
                task()
            except Exception:
                engine_log.exception("background task of %s failed", self._thread.name)


_BATCH_BYTES = 64 * 2**20
_READERS = 4
_LARGE_BYTES = 2**18
"""Block size in bytes from which several threads read and check blocks faster than one thread."""


@dataclass(slots=True)
class Counts:
    """Counters, written by one thread. ``seconds``: total transfer time, with copies."""

    blocks: int = 0
    seconds: float = 0.0


@dataclass(slots=True, eq=False)
class BlockLoad:
    """Blocks to load: ``hashes[i]`` into ``blocks[i]``. The first ``loaded`` are loaded already."""

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
        done: Callable[[BlockLoad], None],
    ) -> None:
        self.counts = Counts()
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

    def submit(self, load: BlockLoad) -> None:
        self._background.submit(lambda: self._run(load))

    def close(self, grace_s: float) -> None:
        self._background.close(grace_s)
        if self._readers is not None:
            self._readers.shutdown(wait=False, cancel_futures=True)

    def _run(self, load: BlockLoad) -> None:
        started = time.perf_counter()
        try:
            while load.loaded < len(load.hashes):
                count = self._read_batch(load)
                if not count:
                    break
                first = load.loaded
                self._memory.copy_in(self._staging, load.blocks[first : first + count])
                load.loaded += count
            self._store.touch(load.hashes[: load.loaded])
            self.counts.blocks += load.loaded
            self.counts.seconds += time.perf_counter() - started
        finally:
            self._done(load)

    def _read_batch(self, load: BlockLoad) -> int:
        """Read the next blocks into the staging rows; returns the number before the first miss."""
        hashes = load.hashes[load.loaded : load.loaded + len(self._staging)]
        rows = zip(hashes, self._staging, strict=False)
        if self._readers is None:
            return sum(1 for _ in takewhile(bool, starmap(self._store.read, rows)))
        reads = [self._readers.submit(self._store.read, *row) for row in rows]
        # Wait for all reads: one left after a miss would write into the rows of the next load.
        wait(reads)
        return sum(1 for _ in takewhile(Future[bool].result, reads))


_SAVE_BYTES = 16 * 2**20


class PinnedBlock(NamedTuple):
    """A pool block that the engine does not change during a copy."""

    block: int
    block_hash: bytes
    is_spill: bool


class Saver:
    """Saves blocks, and calls ``returned(blocks)`` on its own thread once they are copied."""

    def __init__(
        self,
        store: BlockStore,
        memory: KVMemory,
        background: Background,
        returned: Callable[[Sequence[PinnedBlock]], None],
    ) -> None:
        self.counts = Counts()
        self._store = store
        self._memory = memory
        self._background = background
        self._returned = returned
        batch = max(1, _SAVE_BYTES // memory.format.block_bytes)
        self._staging = memory.staging(batch)

    def submit(self, pinned: Sequence[PinnedBlock], text: Sequence[bytes] = ()) -> None:
        """Save blocks: the last missing blocks of ``text``, unless that is empty."""
        self._background.submit(lambda: self._run(pinned, text))

    def remove(self, hashes: Collection[bytes]) -> None:
        """Delete files, even files that earlier saves have not written yet."""
        self._background.submit(lambda: self._store.remove(hashes))

    def close(self, grace_s: float) -> None:
        """Finish the submitted saves within ``grace_s``."""
        self._background.close(grace_s)

    def _run(self, left: Sequence[PinnedBlock], text: Sequence[bytes]) -> None:
        started = time.perf_counter()
        size = len(self._staging)
        try:
            while left:
                batch, left = left[:size], left[size:]
                try:
                    self._memory.copy_out([pinned.block for pinned in batch], self._staging)
                finally:
                    self._returned(batch)
                for pinned, content in zip(batch, self._staging, strict=False):
                    # A block is pinned twice if its text continued before the file was written.
                    if not self._store.holds(pinned.block_hash):
                        self.counts.blocks += self._store.write(pinned.block_hash, content)
            if text:
                self._store.touch(list(takewhile(self._store.holds, text)))
        finally:
            self.counts.seconds += time.perf_counter() - started
            # Return the blocks not reached; if none, this signals that the counts changed.
            self._returned(left)
