"""The KV pool's bookkeeping: which fixed pages are free. Knows nothing of tensors."""

from collections.abc import Sequence


class BlockPool:
    """Blocks ``0 … total-1``, each free or used; allocating or freeing one is O(1).

    Always: ``used + free == total`` (WK-4).
    """

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a block pool needs at least 1 block, got {total}")
        self.total = total
        # A stack: the block that was freed last is the one most likely still in a CPU cache.
        self._free = list(range(total - 1, -1, -1))
        self._is_used = bytearray(total)

    @property
    def free_count(self) -> int:
        return len(self._free)

    @property
    def used_count(self) -> int:
        return self.total - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks; the caller has seen that ``free_count`` is enough."""
        assert 0 < count <= len(self._free), f"asked for {count} of {len(self._free)} free blocks"
        blocks = self._free[-count:]
        del self._free[-count:]
        for block in blocks:
            self._is_used[block] = 1
        return blocks

    def free(self, blocks: Sequence[int]) -> None:
        """Give blocks back. Each must be in use: a double free is our own bug."""
        for block in blocks:
            assert self._is_used[block], f"block {block} was freed twice"
            self._is_used[block] = 0
        self._free.extend(blocks)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` when the books do not balance."""
        assert len(set(self._free)) == len(self._free), "a block is free twice"
        assert not any(self._is_used[block] for block in self._free), "a free block is in use"
        assert sum(self._is_used) + len(self._free) == self.total, "a block was lost"
