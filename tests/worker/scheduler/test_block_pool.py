from collections.abc import Sequence

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from worker.scheduler.block_pool import BlockPool

TOTAL = 12
TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=6)


def hashes_of(text: list[int]) -> list[bytes]:
    """As real names do, each stands for all that comes before it too."""
    return [bytes(text[: i + 1]) for i in range(len(text))]


class PoolMachine(RuleBasedStateMachine):
    """WK-4, WK-5: allocate, fork, name, free, evict in any order; every block has one role."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL, self.clear)
        self.spoilt: set[int] = set()
        """Used blocks that were said to be, and are not cleared yet."""
        self.held: list[list[int]] = []
        self.content: dict[int, bytes] = {}
        self.kept: list[list[bytes]] = []
        self.remote: set[bytes] = set()
        """What somebody knows who hears only of changes."""

    @rule(text=TEXTS)
    def start(self, text: list[int]) -> None:
        """Take a text's blocks: what is cached is shared, the rest is new and then named."""
        hashes = hashes_of(text)
        shared = self.pool.match(hashes)
        assert [self.content[block] for block in shared] == hashes[: len(shared)]
        if not self.pool.fits(shared, len(hashes) - len(shared)):
            return
        self.pool.share(shared)
        new = self.pool.allocate(len(hashes) - len(shared))
        for block, block_hash in zip(new, hashes[len(shared) :], strict=True):
            self.content.pop(block, None)
            if self.pool.register(block, block_hash):
                self.content[block] = block_hash
        self.held.append(shared + new)

    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        blocks = self.pool.allocate(data.draw(st.integers(0, self.pool.free_count)))
        for block in blocks:
            self.content.pop(block, None)
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.pool.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    def clear(self, blocks: Sequence[int]) -> None:
        held = {block for blocks in self.held for block in blocks}
        assert not held.intersection(blocks), "cleared while in use"
        assert self.spoilt.issuperset(blocks) and len(set(blocks)) == len(blocks)
        self.spoilt.difference_update(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def spoil(self, data: st.DataObject) -> None:
        """WK-12. A request that shares some of them continues with them."""
        blocks = self.held[data.draw(st.integers(0, len(self.held) - 1))]
        self.pool.spoil(blocks)
        self.spoilt.update(blocks)
        for block in blocks:
            self.content.pop(block, None)

    @rule(text=TEXTS)
    def keep(self, text: list[int]) -> None:
        self.kept.append(hashes_of(text))
        self.pool.keep(self.kept[-1])

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def unkeep(self, data: st.DataObject) -> None:
        self.pool.unkeep(self.kept.pop(data.draw(st.integers(0, len(self.kept) - 1))))

    @rule()
    def forget(self) -> None:
        self.pool.forget()
        assert self.pool.cached_count == 0

    @rule()
    def hear_of_changes(self) -> None:
        change = self.pool.take_changes()
        if change is not None:
            assert not set(change.added) & self.remote
            assert set(change.evicted) <= self.remote
            self.remote = (self.remote | set(change.added)) - set(change.evicted)
        assert self.remote == set(self.pool.hashes)
        assert self.pool.take_changes() is None

    @invariant()
    def nothing_leaks_or_overlaps(self) -> None:
        pool = self.pool
        pool.check_integrity()
        held = {block for blocks in self.held for block in blocks}
        assert len(held) == pool.used_count
        assert self.spoilt <= held, "free, and not cleared"
        assert pool.used_count + pool.free_count == pool.total == TOTAL
        wanted = {block_hash for hashes in self.kept for block_hash in hashes}
        assert pool.kept_hashes == len(wanted)
        assert pool.kept_count == sum(block_hash in wanted for block_hash in pool.hashes) - sum(
            self.content.get(block) in wanted for block in held
        )
        for block in range(TOTAL):
            assert pool._references[block] == sum(block in blocks for blocks in self.held)
        for block_hash in pool.hashes:
            (block,) = [b for b, other in enumerate(pool._hashes) if other == block_hash]
            assert self.content[block] == block_hash

    def teardown(self) -> None:
        while self.held:
            self.pool.free(self.held.pop())
        self.nothing_leaks_or_overlaps()


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def cached(pool: BlockPool, text: list[int]) -> list[int]:
    blocks = pool.allocate(len(text))
    for block, block_hash in zip(blocks, hashes_of(text), strict=True):
        pool.register(block, block_hash)
    pool.free(blocks)
    return blocks


def test_the_least_recently_used_goes_first_and_a_text_from_its_end() -> None:
    """WK-5: a head without its tail is of use, a tail without its head is not."""
    pool = BlockPool(6)
    cached(pool, [1, 1, 1])
    cached(pool, [2, 2])
    pool.allocate(2)
    assert len(pool.match(hashes_of([1, 1, 1]))) == 2
    assert len(pool.match(hashes_of([2, 2]))) == 2
    pool.share(used := pool.match(hashes_of([1, 1])))
    pool.free(used)
    pool.allocate(2)
    assert len(pool.match(hashes_of([1, 1]))) == 2
    assert pool.match(hashes_of([2, 2])) == []


def test_wk9_what_is_kept_is_free_and_evicted_after_all_others() -> None:
    pool = BlockPool(6)
    cached(pool, [1, 1, 1])
    cached(pool, [2, 2, 2])
    pool.keep(hashes_of([1, 1, 1]))
    assert (pool.free_count, pool.cached_count, pool.kept_count) == (6, 6, 3)
    pool.free(pool.allocate(3))
    assert len(pool.match(hashes_of([1, 1, 1]))) == 3
    assert pool.match(hashes_of([2, 2, 2])) == []
    pool.allocate(4)
    assert len(pool.match(hashes_of([1, 1, 1]))) == 2
    assert pool.kept_count == 2
    pool.unkeep(hashes_of([1, 1, 1]))
    assert (pool.kept_count, pool.kept_hashes, pool.cached_count) == (0, 0, 2)


def test_faults_of_the_books_are_caught() -> None:
    """WK-4."""
    pool = BlockPool(4)
    pool.free(blocks := pool.allocate(2))
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)
    with pytest.raises(AssertionError, match="5 of 4"):
        pool.allocate(5)
    pool.allocate(1)
    pool._references[:] = [0] * 4
    with pytest.raises(AssertionError, match="lost"):
        pool.check_integrity()
