import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from worker.engine.block_pool import BlockPool

TOTAL = 20


class PoolMachine(RuleBasedStateMachine):
    """WK-4: whatever is taken and given back, used + free = total and nobody shares a block."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(TOTAL)
        self.held: list[list[int]] = []

    @precondition(lambda self: self.pool.free_count)
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        count = data.draw(st.integers(1, self.pool.free_count))
        blocks = self.pool.allocate(count)
        assert len(blocks) == count
        self.held.append(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        self.pool.free(self.held.pop(data.draw(st.integers(0, len(self.held) - 1))))

    @invariant()
    def nothing_leaks_or_overlaps(self) -> None:
        self.pool.check_integrity()
        held = [block for blocks in self.held for block in blocks]
        assert len(held) == len(set(held)) == self.pool.used_count
        assert self.pool.used_count + self.pool.free_count == self.pool.total == TOTAL
        assert set(held) <= set(range(TOTAL))


TestPool = PoolMachine.TestCase


def test_double_free_is_caught() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.free(blocks)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(blocks)


def test_more_than_there_is_is_caught() -> None:
    with pytest.raises(AssertionError, match="5 of 4"):
        BlockPool(4).allocate(5)


def test_a_lost_block_is_caught() -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    pool._is_used[:] = bytes(4)
    with pytest.raises(AssertionError, match="lost"):
        pool.check_integrity()


def test_an_empty_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)
