"""Decides which blocks to save and restore, on the engine's thread, which waits for neither.

::

    near its turn ─▶ is more of its head on disk than in the pool, and is loading it quicker than
                 computing it?  ─▶ it waits in the queue while reserved blocks are filled
    ended     ─▶ the full blocks of a conversation are pinned for the saver, those not on disk yet
    each step ─▶ blocks come back; loaded ones get their hashes and are then found like any other;
                 when empty blocks run low, the next ones to be evicted are pinned and saved too
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile
from pathlib import Path

from worker.kv_disk.base import BlockTier, KVMemory, TierStats
from worker.kv_disk.block_store import BlockStore, fingerprint
from worker.kv_disk.transfers import (
    Background,
    BackgroundThread,
    BlockLoad,
    Loader,
    PinnedBlock,
    Saver,
)
from worker.log import model_log
from worker.scheduler.request import Request
from worker.scheduler.scheduler import Scheduler

_FEWEST_BLOCKS = 2
"""Minimum blocks worth loading: fewer blocks are faster to compute."""
_LOOKAHEAD = 4
"""Number of requests at the front of the queue whose heads are loaded in advance."""
_SPILL_BLOCKS = 8
"""Number of blocks pinned for the saver at a time, before their eviction."""
_PATIENCE_S = 1.0
"""Seconds that a request waits for a load while the compute speed is unknown."""
_LEAST_PATIENCE_S = 0.1
"""Minimum patience in seconds with a load, even if computing is faster."""
_CLOSE_GRACE_S = 2.0


@dataclass(slots=True, eq=False)
class _Restore:
    """A load and the requests that wait for it. ``held``: the pool's blocks before the loaded
    blocks, kept during the load."""

    load: BlockLoad
    held: list[int]
    waiting: list[Request]
    expected_at: float
    give_up_at: float
    is_void: bool = False
    """Whether the loaded blocks must not be used."""

    def gives_up_at(self, request: Request) -> float:
        """Time at which ``request`` computes its head instead: no later than its latest start,
        unless only the load could meet its deadline."""
        is_choice = request.latest_start > self.expected_at
        return min(self.give_up_at, request.latest_start) if is_choice else self.give_up_at


@dataclass(slots=True)
class _Wanted:
    """Blocks to save, in order, not pinned yet: they may be evicted first."""

    hashes: deque[bytes]
    text: list[bytes] = field(default_factory=list)
    is_spill: bool = False


class DiskTier(BlockTier):
    """A ``BlockTier`` that keeps blocks in files."""

    def __init__(
        self,
        scheduler: Scheduler,
        store: BlockStore,
        memory: KVMemory,
        loading: Background,
        saving: Background,
    ) -> None:
        """``memory`` is the memory of the scheduler's pool; the tier closes both backgrounds."""
        self._scheduler = scheduler
        self._pool = scheduler.pool
        self._prefix_cache = scheduler.prefix_cache
        self._store = store
        self._loader = Loader(store, memory, loading, self._put)
        self._saver = Saver(store, memory, saving, self._put)
        self._wake: Callable[[], None] = lambda: None
        self._results: deque[BlockLoad | Sequence[PinnedBlock]] = deque()
        self._restores: dict[BlockLoad, _Restore] = {}
        self._by_first_hash: dict[bytes, _Restore] = {}
        self._wanted: deque[_Wanted] = deque()
        self._saving: dict[bytes, PinnedBlock] = {}
        """Blocks that the saver is working on, by hash."""
        self._most_saving = max(1, self._pool.total // 4)
        self._spilled: set[bytes] = set()
        self._closed = False

    def attach(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def stats(self) -> TierStats:
        saved, loaded = self._saver.counts, self._loader.counts
        return TierStats(
            saved_blocks=saved.blocks,
            save_ms=saved.seconds * 1e3,
            loaded_blocks=loaded.blocks,
            load_ms=loaded.seconds * 1e3,
            failures=self._store.failures_total,
        )

    # ── from disk ────────────────────────────────────────────────────────────────────────────

    def restore(self, waiting: Sequence[Request], now: float) -> None:
        # Only the front of a long queue: more loads would flush each other out of the pool.
        for request in islice(waiting, _LOOKAHEAD):
            if not request.is_looked_up:
                request.is_looked_up = True
                self._restore(request, now)

    def _restore(self, request: Request, now: float) -> None:
        hashes = request.hashes[: self._prefix_cache.shareable_blocks(request)]
        held = self._pool.match(hashes)
        missing = hashes[len(held) :]
        if not missing:
            return
        ongoing = self._by_first_hash.get(missing[0])
        if ongoing is not None:
            request.loading = True
            ongoing.waiting.append(request)
            return
        if self._is_stuck(now):
            return
        wanted = list(takewhile(self._store.holds, missing))
        # Half of the free blocks: a load must not flush everything else out of the pool.
        wanted = wanted[: max(0, self._pool.free_count - len(held)) // 2]
        if len(wanted) < _FEWEST_BLOCKS or not self._pays(request, len(wanted), now):
            return
        self._scheduler.pin(held)
        load = BlockLoad(wanted, self._scheduler.reserve_blocks(len(wanted)))
        # Waiting at most as long as computing takes costs at most twice the better choice.
        patience_s = max(_LEAST_PATIENCE_S, self._compute_s(len(wanted)) or _PATIENCE_S)
        expected_at = now + self._loader.block_s() * len(wanted)
        restore = _Restore(load, held, [request], expected_at, now + patience_s)
        request.loading = True
        self._restores[load] = self._by_first_hash[wanted[0]] = restore
        self._loader.submit(load)

    def _is_stuck(self, now: float) -> bool:
        """Whether an abandoned load is still running; no more blocks are reserved then."""
        return any(now >= restore.give_up_at for restore in self._restores.values())

    def _pays(self, request: Request, blocks: int, now: float) -> bool:
        """Whether loading is faster than computing and leaves time for the rest."""
        load_s, compute_s = self._loader.block_s() * blocks, self._compute_s(blocks)
        if compute_s and load_s >= compute_s:
            return False
        return now + load_s < request.latest_start + compute_s

    def _compute_s(self, blocks: int) -> float:
        tokens = blocks * self._scheduler.config.block_tokens
        return self._scheduler.step_time.prefill_s(tokens)

    def _restored(self, restore: _Restore) -> None:
        load = restore.load
        del self._by_first_hash[load.hashes[0]]
        loaded = 0 if restore.is_void else load.loaded
        for block, block_hash in zip(load.blocks[:loaded], load.hashes, strict=False):
            self._pool.register(block, block_hash)
        self._scheduler.unpin(restore.held + load.blocks)
        self._let_go(restore)

    def _let_go(self, restore: _Restore, now: float = math.inf) -> bool:
        """Let requests compute whose patience ends with the next step. Returns whether any do."""
        next_s = now + self._scheduler.step_time.step_s
        gone = [one for one in restore.waiting if next_s >= restore.gives_up_at(one)]
        for request in gone:
            request.loading = False
        restore.waiting = [one for one in restore.waiting if one.loading]
        return bool(gone)

    # ── to disk ──────────────────────────────────────────────────────────────────────────────

    def keep(self, request: Request) -> None:
        if not request.job.session or not request.full_blocks:
            return
        text = request.hashes[: request.full_blocks]
        missing = [block_hash for block_hash in text if not self._store.holds(block_hash)]
        self._save(_Wanted(deque(missing), text))

    def forget(self, hashes: Sequence[bytes]) -> None:
        gone = frozenset(hashes)
        for wanted in self._wanted:
            wanted.hashes = deque(one for one in wanted.hashes if one not in gone)
        for restore in self._restores.values():
            restore.is_void = restore.is_void or not gone.isdisjoint(restore.load.hashes)
        self._spilled -= gone
        self._store.disregard(gone)
        self._saver.remove(gone)

    def spill(self) -> None:
        if self._saving or self._wanted or self._pool.empty_count > self._pool.total // 8:
            return
        hashes = [
            block_hash
            for _, block_hash in self._pool.oldest_cached(_SPILL_BLOCKS)
            if block_hash not in self._spilled and not self._store.holds(block_hash)
        ]
        if hashes:
            # Each block is tried once; otherwise, with a full disk, every step would copy it again.
            if len(self._spilled) > self._pool.total:
                self._spilled.clear()
            self._spilled.update(hashes)
            self._save(_Wanted(deque(hashes), is_spill=True))

    def _save(self, wanted: "_Wanted") -> None:
        self._wanted.append(wanted)
        self._pin_wanted()

    def _pin_wanted(self) -> None:
        """Pin blocks to save and pass them to the saver, at most ``_most_saving`` at a time."""
        while self._wanted and len(self._saving) < self._most_saving:
            wanted = self._wanted[0]
            pinned = []
            while wanted.hashes and len(self._saving) < self._most_saving:
                block_hash = wanted.hashes.popleft()
                block = self._pool.find(block_hash)
                if block is not None and block_hash not in self._saving:
                    self._saving[block_hash] = PinnedBlock(block, block_hash, wanted.is_spill)
                    pinned.append(self._saving[block_hash])
            self._scheduler.pin([one.block for one in pinned])
            if wanted.hashes:
                self._saver.submit(pinned)
            else:
                self._saver.submit(pinned, wanted.text)
                self._wanted.popleft()

    # ── back again ───────────────────────────────────────────────────────────────────────────

    def _put(self, result: BlockLoad | Sequence[PinnedBlock]) -> None:
        """Queue a result, on the threads of loader and saver."""
        self._results.append(result)
        self._wake()

    def collect(self, now: float) -> None:
        while self._results:
            result = self._results.popleft()
            if isinstance(result, BlockLoad):
                restore = self._restores.pop(result, None)
                if restore is not None:
                    self._restored(restore)
            else:
                self._unpin(result)
                self._pin_wanted()
        for restore in self._restores.values():
            if self._let_go(restore, now):
                self._scheduler.unblock()

    def _unpin(self, pinned: Sequence[PinnedBlock]) -> None:
        back = [
            self._saving.pop(one.block_hash) for one in pinned if one.block_hash in self._saving
        ]
        for is_spill in (False, True):
            # Saving a block does not count as use: its position in the eviction order stays.
            blocks = [one.block for one in back if one.is_spill is is_spill]
            self._scheduler.unpin(blocks, as_oldest=is_spill)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._most_saving = self._pool.total  # they are no longer needed
        self._pin_wanted()
        self._loader.close(0.0)
        self._saver.close(_CLOSE_GRACE_S)
        self.collect(now=float("inf"))
        for restore in list(self._restores.values()):
            restore.load.loaded = 0
            self._restored(restore)
        self._restores.clear()
        self._unpin(list(self._saving.values()))


def open_disk_tier(
    scheduler: Scheduler, memory: KVMemory, path: Path, most_bytes: int, origin: str
) -> DiskTier:
    """Open the tier at ``path`` for blocks of ``origin``, which identifies what computed them.

    Raises ``ValueError`` when ``path`` cannot be used.
    """
    root = path / fingerprint(origin, memory.format)
    try:
        store = BlockStore(root, memory.format, most_bytes=most_bytes)
    except OSError as error:
        raise ValueError(
            f"TIDEGATE_WORKER__KV__DISK_PATH: {path} cannot be used ({error.strerror}); name a"
            " directory that the worker may write to"
        ) from error
    model_log.info("KV disk %s holds %d blocks for this model", path, len(store))
    loading, saving = BackgroundThread("tidegate-kv-load"), BackgroundThread("tidegate-kv-save")
    for other in sorted(path.iterdir()):
        if other != root and (other / "blocks").is_dir():
            model_log.info(
                "KV of another model or engine is in %s; delete it if that is gone", other
            )
    return DiskTier(scheduler, store, memory, loading, saving)
