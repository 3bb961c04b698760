"""Saves pool blocks to disk, a batch at a time, giving them back before a file is written."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from worker.kv_disk.background import Background
from worker.kv_disk.block_store import BlockStore
from worker.kv_disk.copies import KVMemory

_BATCH_BYTES = 16 * 2**20


class PinnedBlock(NamedTuple):
    """A block of the pool that the engine leaves unchanged for as long as a copy takes."""

    block: int
    block_hash: bytes
    is_spill: bool


@dataclass(slots=True)
class SaveCounts:
    """Counters, written by the saver's thread. ``seconds``: all saving time, with copies."""

    blocks: int = 0
    seconds: float = 0.0
    sessions: int = 0
    """Turns of conversations saved."""


@dataclass(slots=True)
class Save:
    """Blocks to be saved, and the ``session`` whose blocks are ``text``, if a turn of one ended."""

    pinned: list[PinnedBlock]
    session: str = ""
    text: list[bytes] = field(default_factory=list)


class Saver:
    """Saves blocks, and calls ``returned(blocks)`` on its own thread once they are copied."""

    def __init__(
        self,
        store: BlockStore,
        memory: KVMemory,
        background: Background,
        returned: Callable[[Sequence[PinnedBlock]], None],
    ) -> None:
        self.counts = SaveCounts()
        self._store = store
        self._memory = memory
        self._background = background
        self._returned = returned
        batch = max(1, _BATCH_BYTES // memory.format.block_bytes)
        self._staging = memory.staging(batch)

    def submit(self, save: Save) -> None:
        self._background.submit(lambda: self._run(save))

    def remove(self, hashes: Collection[bytes]) -> None:
        """Delete files, even those that saves submitted earlier have yet to write."""
        self._background.submit(lambda: self._store.remove(hashes))

    def close(self, grace_s: float) -> None:
        """Finish what was submitted, within ``grace_s``."""
        self._background.close(grace_s)

    def _run(self, save: Save) -> None:
        started = time.perf_counter()
        size = len(self._staging)
        left = save.pinned
        try:
            while left:
                batch, left = left[:size], left[size:]
                try:
                    self._memory.copy_out([pinned.block for pinned in batch], self._staging)
                finally:
                    self._returned(batch)
                for pinned, content in zip(batch, self._staging, strict=False):
                    # A block is pinned twice if its text went on before the file was written.
                    if not self._store.holds(pinned.block_hash):
                        self.counts.blocks += self._store.write(pinned.block_hash, content)
            if save.session:
                kept = list(takewhile(self._store.holds, save.text))
                self._store.touch(kept)
                self._store.remember(save.session, kept)
                self.counts.sessions += 1
        finally:
            self.counts.seconds += time.perf_counter() - started
            # Returns those not reached; if there are none, it signals that the counts have changed.
            self._returned(left)
