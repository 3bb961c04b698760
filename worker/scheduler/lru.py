"""Least recently used blocks in an intrusive list: every operation O(1), nothing allocated."""

from collections.abc import Iterator


class LruList:
    """Some of the blocks ``0 … total-1``, in the order in which they were pushed."""

    def __init__(self, total: int) -> None:
        # Index ``total`` is the list's own end: a ring, so that no operation has a special case.
        self._end = total
        self._older = [total] * (total + 1)
        self._newer = [total] * (total + 1)
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[int]:
        """Oldest first. Do not change the list meanwhile."""
        block = self._newer[self._end]
        while block != self._end:
            yield block
            block = self._newer[block]

    def push(self, block: int) -> None:
        """Make ``block``, which is not in the list, its newest."""
        newest = self._older[self._end]
        self._older[block], self._newer[block] = newest, self._end
        self._newer[newest] = self._older[self._end] = block
        self._count += 1

    def push_oldest(self, block: int) -> None:
        """Make ``block``, which is not in the list, its oldest."""
        oldest = self._newer[self._end]
        self._newer[block], self._older[block] = oldest, self._end
        self._older[oldest] = self._newer[self._end] = block
        self._count += 1

    def remove(self, block: int) -> None:
        """Take ``block``, which is in the list, out of it."""
        older, newer = self._older[block], self._newer[block]
        self._newer[older], self._older[newer] = newer, older
        self._count -= 1

    def pop_oldest(self) -> int:
        """Take the oldest block out of a list that is not empty."""
        assert self._count, "the list is empty"
        block = self._newer[self._end]
        self.remove(block)
        return block
