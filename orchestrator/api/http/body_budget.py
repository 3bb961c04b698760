"""A bound on the bytes of request bodies that are arriving, over all connections.

Bytes count when they come, not when a Content-Length announces them, so an announcement alone
reserves nothing. Nobody waits for room, so nobody can wait for ever. When there is none, the
unfinished body that holds most is given up for one that holds less; otherwise the one that wants
more is. A few large bodies that never end therefore keep no small one out.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from orchestrator.errors import NoCapacity

ALL_BODIES_BYTES: Final = 256 * 2**20
"""Bytes that all bodies may hold together: 64 of the usual largest size."""
RETRY_AFTER_MS = 1000.0
SMALL_BYTES = 64 * 2**10
"""Largest body that may use the last eighth of the budget. Whole bodies that wait to be decoded are
never given up, and could otherwise fill it."""


class BodyShare:
    """One body's part of the budget."""

    def __init__(self, budget: "BodyBudget", give_up: Callable[[], None]) -> None:
        self._budget = budget
        self.give_up = give_up
        self.held_bytes = 0
        self.is_given_up = False

    def take(self, count: int) -> None:
        """Count ``count`` more bytes that have come. Raises ``NoCapacity`` if there is no room for
        them."""
        if self.is_given_up or not self._budget.make_room(self, count):
            raise self.refusal()
        self.held_bytes += count

    def finish(self) -> None:
        """Note that the body is whole: it is no longer given up for others. Raises ``NoCapacity``
        when it has just been."""
        if self.is_given_up:
            raise self.refusal()
        self._budget.finished(self)

    def refusal(self) -> NoCapacity:
        return NoCapacity(
            f"too many request bodies are arriving at once, of which {self._budget.most_bytes} "
            "bytes are held; try again shortly",
            retry_after_ms=RETRY_AFTER_MS,
        )


class BodyBudget:
    """Bounds all bodies together to ``most_bytes``."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.total_bytes = 0
        self._unfinished: dict[BodyShare, None] = {}

    @contextmanager
    def share(self, give_up: Callable[[], None]) -> Iterator[BodyShare]:
        """Context manager for a body's part, which is returned at the end of the block.

        ``give_up`` is called when its room is taken away. It must stop the reading soon, and must
        not raise.
        """
        share = BodyShare(self, give_up)
        self._unfinished[share] = None
        try:
            yield share
        finally:
            self._unfinished.pop(share, None)
            self._release(share)

    def make_room(self, share: BodyShare, count: int) -> bool:
        """Count ``count`` more bytes for ``share``; False if it may not have them."""
        is_small = share.held_bytes + count <= SMALL_BYTES
        most = self.most_bytes if is_small else self.most_bytes * 7 // 8
        while self.total_bytes + count > most:
            others = (other for other in self._unfinished if other is not share)
            largest = max(others, key=lambda other: other.held_bytes, default=None)
            if largest is None or largest.held_bytes <= share.held_bytes + count:
                return False
            del self._unfinished[largest]
            self._release(largest)
            largest.is_given_up = True
            largest.give_up()
        self.total_bytes += count
        return True

    def finished(self, share: BodyShare) -> None:
        self._unfinished.pop(share, None)

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` if the totals do not add up."""
        assert 0 <= self.total_bytes <= self.most_bytes
        assert sum(share.held_bytes for share in self._unfinished) <= self.total_bytes
        assert not any(share.is_given_up for share in self._unfinished)

    def _release(self, share: BodyShare) -> None:
        self.total_bytes -= share.held_bytes
        share.held_bytes = 0
