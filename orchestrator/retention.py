"""Keeps work that can be asked about: all that runs, and as much that has ended as bounds allow."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from orchestrator.clock import Clock
from orchestrator.errors import NotFound
from worker.environment import Section


class Retention(Section):
    """Bounds on what is kept after its end: items, seconds, and bytes of all together."""

    keep_count: int
    keep_s: float
    keep_bytes: int


class _Marks(Protocol):
    @property
    def ended(self) -> float:
        """When the item ended, in seconds of the clock."""


class Keepable(Protocol):
    """Work that can be kept."""

    id: str

    @property
    def marks(self) -> _Marks: ...

    @property
    def kept_bytes(self) -> int:
        """Approximate memory that keeping it takes once it has ended."""


T = TypeVar("T", bound=Keepable)


ItemCall = Callable[[str, str], None]
"""Called with the key and name of an item that a client keeps here."""


def ignore(key: str, name: str) -> None:
    """Do nothing, where nobody wants to hear of an item."""


def no_such(what: str, item_id: str) -> NotFound:
    """The answer for an unknown id, and for work that is not the caller's; ``what`` it is."""
    error = NotFound(f"there is no {what} {item_id[:64]!r}; ended ones are kept for a while only")
    error.item_id = item_id
    return error


class KeptStore(Generic[T]):
    """Work by id. What has ended is dropped while a bound is exceeded, the oldest first."""

    def __init__(self, clock: Clock, retention: Retention, what: str) -> None:
        """``what``: what an item is called in the answer for an unknown id."""
        self.on_forget: list[Callable[[T], None]] = []
        """Called with each item that is dropped."""
        self.latest_end = -math.inf
        """When the last item ended that its client may still come for."""
        self.total_bytes = 0
        """Bytes that all ended items take."""
        self._clock = clock
        self._retention = retention
        self._what = what
        self._running: dict[str, T] = {}
        self._ended: OrderedDict[str, T] = OrderedDict()
        self._bytes: dict[str, int] = {}
        """Bytes of each ended item, by id."""

    def __len__(self) -> int:
        return len(self._running) + len(self._ended)

    def __contains__(self, item: T) -> bool:
        return item.id in self._running or item.id in self._ended

    def keep(self, item: T) -> None:
        """Keep an item that runs; ``item_ended`` must be called at its end."""
        self._running[item.id] = item

    def get(self, item_id: str) -> T:
        """The item of that id. Raises ``NotFound``."""
        self.prune()
        item = self._running.get(item_id) or self._ended.get(item_id)
        if item is None:
            raise no_such(self._what, item_id)
        return item

    def running(self) -> Iterator[T]:
        """Items that have not ended, the newest first."""
        return reversed(self._running.values())

    def ended(self) -> Iterator[T]:
        """Items that have ended, the newest first."""
        self.prune()
        return reversed(self._ended.values())

    def newest_first(self) -> Iterator[T]:
        """Running items, then ended ones, each the newest first."""
        self.prune()
        yield from self.running()
        yield from self.ended()

    def prune(self) -> None:
        """Drop ended items beyond a bound, the oldest first."""
        retention = self._retention
        oldest_kept = self._clock.now() - retention.keep_s
        while self._ended:
            item = next(iter(self._ended.values()))
            if (
                len(self._ended) <= retention.keep_count
                and self.total_bytes <= retention.keep_bytes
                and item.marks.ended >= oldest_kept
            ):
                return
            self.forget(item)

    def forget(self, item: T) -> None:
        """Drop an item that has ended. Idempotent."""
        if self._ended.get(item.id) is not item:
            return
        del self._ended[item.id]
        self.total_bytes -= self._bytes.pop(item.id)
        for call in self.on_forget:
            call(item)

    def item_ended(self, item: T) -> None:
        """Go on keeping an item after its end, within the bounds."""
        del self._running[item.id]
        self._ended[item.id] = item
        if self.is_awaited(item):
            self.latest_end = item.marks.ended
        self._bytes[item.id] = item.kept_bytes
        self.total_bytes += self._bytes[item.id]
        self.prune()

    def is_awaited(self, item: T) -> bool:
        """Whether a client may come for an item that has ended, and finds it here only."""
        return True
