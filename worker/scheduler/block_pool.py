"""The bookkeeping of the KV pool: each page's references and prefix hash. No tensors.

::

    used     referenced by one request or by several that share a prefix
    cached holds a prefix with a hash, without references: evicted on demand, oldest first;
             blocks *kept* for sessions go last
    empty holds no content that can be reused
    spoilt   used, and never found again: cleared when its last reference goes, and empty then

    free = empty + cached,  used + free = total, always (WK-4)

A block hash (``protocol.blocks``) covers a block's content and everything before it. So a block
with a hash is never written again, and only full blocks have one.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain, islice

from protocol import KvReport


class BlockPool:
    """Blocks ``0 … total-1`` with reference counts and hashes. Operations are O(1) per block."""

    def __init__(
        self, total: int, clear: Callable[[Sequence[int]], None] = lambda blocks: None
    ) -> None:
        """``clear`` fills the memory of unused blocks with zeros before it returns."""
        if total < 1:
            raise ValueError(f"a block pool needs at least 1 block, got {total}")
        self.total = total
        # A stack: the block that was freed last is most likely still in a CPU cache.
        self._empty = list(range(total - 1, -1, -1))
        self._clear = clear
        self._spoilt: set[int] = set()
        self._references = [0] * total
        self._hashes: list[bytes | None] = [None] * total
        self._blocks: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()
        """Cached blocks that are not kept, oldest first."""
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Cached blocks that are kept, oldest first, evicted after all ``_cached`` ones."""
        self._keeps: dict[bytes, int] = {}
        """Number of keepers of each hash, even if no block has it now."""
        # Dicts, because they keep their order and remove a hash in O(1).
        self._added: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}

    @property
    def free_count(self) -> int:
        """Number of blocks that ``allocate`` can give: empty ones, and cached ones by eviction."""
        return len(self._empty) + len(self._cached) + len(self._kept)

    @property
    def used_count(self) -> int:
        return self.total - self.free_count

    @property
    def cached_count(self) -> int:
        """Number of free blocks whose content may be used again."""
        return len(self._cached) + len(self._kept)

    @property
    def kept_hashes(self) -> int:
        """Number of kept hashes; their blocks may be used, cached or evicted."""
        return len(self._keeps)

    @property
    def kept_count(self) -> int:
        """Number of cached blocks that are kept and therefore evicted last."""
        return len(self._kept)

    @property
    def empty_count(self) -> int:
        """Number of free blocks that ``allocate`` can give without eviction."""
        return len(self._empty)

    @property
    def hashes(self) -> Iterable[bytes]:
        """Every hash that ``match`` would find."""
        return self._blocks.keys()

    # ── blocks in and out ────────────────────────────────────────────────────────────────────

    def allocate(self, count: int) -> list[int]:
        """Allocate ``count`` blocks with any content; the caller checks that enough are free."""
        assert 0 <= count <= self.free_count, f"asked for {count} of {self.free_count} free blocks"
        while len(self._empty) < count:
            self._evict_oldest()
        split = len(self._empty) - count
        blocks = self._empty[split:]
        del self._empty[split:]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Take another reference to blocks that have a hash."""
        for block in blocks:
            assert self._hashes[block] is not None, f"block {block} has no hash to share it by"
            if not self._references[block]:
                cached = self._cached if block in self._cached else self._kept
                del cached[block]
            self._references[block] += 1

    def free(self, blocks: Sequence[int], *, as_oldest: bool = False) -> None:
        """Release one reference to each block; an extra release is a bug (``AssertionError``).

        ``blocks`` are in the order of their text: its end is then evicted before its beginning,
        which ``match`` needs to find the end. ``as_oldest``: they are evicted before all others.
        """
        spoilt: list[int] = []
        for block in blocks if as_oldest else reversed(blocks):
            references = self._references[block]
            assert references, f"block {block} was freed twice"
            self._references[block] = references - 1
            if references == 1:
                block_hash = self._hashes[block]
                if block_hash is None:
                    (spoilt if block in self._spoilt else self._empty).append(block)
                elif block_hash in self._keeps:
                    self._kept[block] = None
                else:
                    self._cached[block] = None
                    if as_oldest:
                        self._cached.move_to_end(block, last=False)
        if spoilt:
            self._clear(spoilt)
            self._spoilt.difference_update(spoilt)
            self._empty += spoilt

    def spoil(self, blocks: Iterable[int]) -> None:
        """Mark used blocks as invalid: ``match`` never finds them again."""
        for block in blocks:
            assert self._references[block], f"block {block} was spoilt while free"
            self._spoilt.add(block)
            block_hash = self._hashes[block]
            if block_hash is not None:
                self._hashes[block] = None
                self._forget_hash(block_hash)

    def fits(self, shared: Sequence[int], count: int) -> bool:
        """Whether ``share(shared)`` and then ``allocate(count)`` are possible."""
        references = self._references
        evictable = sum(1 for block in shared if not references[block])
        return count + evictable <= self.free_count

    # ── kept blocks ────────────────────────────────────────────────────────────────────────

    def keep(self, hashes: Sequence[bytes]) -> None:
        """From now on, evict blocks with these hashes after all others; they still count as
        free."""
        for block_hash in reversed(hashes):
            keeps = self._keeps.get(block_hash, 0)
            self._keeps[block_hash] = keeps + 1
            if not keeps and (block := self._blocks.get(block_hash)) in self._cached:
                assert block is not None
                del self._cached[block]
                self._kept[block] = None

    def unkeep(self, hashes: Sequence[bytes]) -> None:
        """End one ``keep`` of these hashes; a block without keepers counts as just used."""
        for block_hash in reversed(hashes):
            keeps = self._keeps.pop(block_hash)
            if keeps > 1:
                self._keeps[block_hash] = keeps - 1
            elif (block := self._blocks.get(block_hash)) in self._kept:
                assert block is not None
                del self._kept[block]
                self._cached[block] = None

    # ── hashes ───────────────────────────────────────────────────────────────────────────────

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """The blocks of the longest prefix of ``hashes`` in the pool. Takes no references."""
        known, blocks = self._blocks, []
        for block_hash in hashes:
            block = known.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def find(self, block_hash: bytes) -> int | None:
        """The block with that hash; None if there is none."""
        return self._blocks.get(block_hash)

    def register(self, block: int, block_hash: bytes) -> bool:
        """Register the hash of a used block after it is computed, so that it can be shared. False
        if another block already has that hash: this one then has none."""
        assert self._references[block], f"block {block} was registered while free"
        assert self._hashes[block] is None, f"block {block} was registered twice"
        assert block not in self._spoilt, f"block {block} was registered although spoilt"
        if block_hash in self._blocks:
            return False
        self._hashes[block] = block_hash
        self._blocks[block_hash] = block
        if block_hash in self._evicted:
            del self._evicted[block_hash]
        else:
            self._added[block_hash] = None
        return True

    def oldest_cached(self, count: int) -> list[tuple[int, bytes]]:
        """The next blocks to evict, at most ``count``, with their hashes."""
        all_cached = chain(self._cached, self._kept)
        cached = ((block, self._hashes[block]) for block in islice(all_cached, count))
        return [(block, block_hash) for block, block_hash in cached if block_hash is not None]

    def forget(self) -> None:
        """Evict all cached blocks, because their content is no longer valid."""
        while self.cached_count:
            self._evict_oldest()

    def take_changes(self) -> KvReport | None:
        """Hashes that were added or evicted since the last call; hashes with both are left out."""
        if not self._added and not self._evicted:
            return None
        report = KvReport(list(self._added), list(self._evicted))
        self._added, self._evicted = {}, {}
        return report

    def _evict_oldest(self) -> None:
        block, _ = (self._cached or self._kept).popitem(last=False)
        block_hash = self._hashes[block]
        assert block_hash is not None
        self._hashes[block] = None
        self._forget_hash(block_hash)
        self._empty.append(block)

    def _forget_hash(self, block_hash: bytes) -> None:
        del self._blocks[block_hash]
        if block_hash in self._added:
            del self._added[block_hash]
        else:
            self._evicted[block_hash] = None

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the accounts contradict each other."""
        empty, cached = set(self._empty), {*self._cached, *self._kept}
        assert not self._cached.keys() & self._kept.keys(), "a block is cached twice"
        assert len(empty) == len(self._empty), "a block is free twice"
        assert not empty & cached, "a block is both empty and cached"
        used = {block for block, references in enumerate(self._references) if references}
        assert not used & (empty | cached), "a free block is in use"
        assert len(used) + len(empty) + len(cached) == self.total, "a block was lost"
        assert min(self._references) >= 0, "a reference was released twice"
        assert self._spoilt <= used, "a free block was not cleared"
        found = {
            block_hash: block
            for block, block_hash in enumerate(self._hashes)
            if block_hash is not None
        }
        assert found == self._blocks, "hashes and blocks do not agree"
        assert not empty & set(found.values()), "an empty block has a hash"
        assert not self._spoilt & set(found.values()), "a spoilt block has a hash"
        assert cached <= set(found.values()), "a cached block has no hash"
        kept = {self._hashes[block] for block in self._kept}
        assert kept <= self._keeps.keys(), "a kept block has no keeper"
        plain = {self._hashes[block] for block in self._cached}
        assert not plain & self._keeps.keys(), "a block that should be kept is not"
        assert all(keeps > 0 for keeps in self._keeps.values()), "a kept hash has no keeper"
