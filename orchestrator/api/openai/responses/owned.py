"""What is kept for clients, each key's own: to another key it does not exist.

Beyond a bound, the oldest of the key that keeps most is dropped, so nobody displaces what others
keep by keeping more.
"""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Generic, NamedTuple, TypeVar

from orchestrator.clock import Clock
from orchestrator.retention import ItemCall, Retention, ignore

T = TypeVar("T")


class _Kept(NamedTuple, Generic[T]):
    item: T
    since: float
    """When it was put here, in seconds of the clock."""
    bytes: int


class OwnedStore(Generic[T]):
    """Items by key and name, within the bounds of a ``Retention``."""

    def __init__(self, clock: Clock, retention: Retention) -> None:
        self.on_change: ItemCall = ignore
        """Called with the key and name of an item that was put here, or dropped."""
        self._clock = clock
        self._retention = retention
        self._by_key: dict[str, OrderedDict[str, _Kept[T]]] = {}
        self._bytes: dict[str, int] = {}
        """Bytes kept, by key."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def kept_bytes(self) -> int:
        return sum(self._bytes.values())

    @property
    def keeps_any(self) -> bool:
        """Whether anything may be kept at all."""
        retention = self._retention
        return min(retention.keep_count, retention.keep_s, retention.keep_bytes) > 0

    def put(self, key: str, name: str, item: T, size: int) -> None:
        """Keep an item of ``size`` bytes as the latest, in place of one of the same name. One that
        is larger than all of the room is not kept."""
        self.adopt(key, name, item, size)
        self.on_change(key, name)

    def adopt(self, key: str, name: str, item: T, size: int) -> None:
        """Keep an item as ``put`` does, without a call for it."""
        self.let_go(key, name)
        bounds = self._retention
        if size > bounds.keep_bytes:
            return
        own = self._by_key.setdefault(key, OrderedDict())
        own[name] = _Kept(item, self._clock.now(), size)
        self._bytes[key] = self._bytes.get(key, 0) + size
        self._count += 1
        for each in list(self._by_key):
            self._prune(each)
        while self._count > bounds.keep_count or self.kept_bytes > bounds.keep_bytes:
            most = max(self._bytes, key=self._bytes.__getitem__)
            self.drop(most, next(iter(self._by_key[most])))

    def touch(self, key: str, name: str) -> None:
        """Keep an item that is kept as if it had just been put here."""
        own = self._by_key[key]
        own[name] = own[name]._replace(since=self._clock.now())
        own.move_to_end(name)

    def names(self) -> Iterator[tuple[str, str]]:
        """Keys and names of all items."""
        return ((key, name) for key, own in self._by_key.items() for name in own)

    def get(self, key: str, name: str) -> T | None:
        """The key's item of that name, if it is kept."""
        self._prune(key)
        own = self._by_key.get(key)
        return None if own is None or name not in own else own[name].item

    def drop(self, key: str, name: str) -> None:
        """Forget an item. Idempotent."""
        if name in self._by_key.get(key, ()):
            self.let_go(key, name)
            self.on_change(key, name)

    def let_go(self, key: str, name: str) -> None:
        """Forget an item as ``drop`` does, without a call for it."""
        own = self._by_key.get(key)
        if own is None or name not in own:
            return
        self._bytes[key] -= own.pop(name).bytes
        self._count -= 1
        if not own:
            del self._by_key[key], self._bytes[key]

    def _prune(self, key: str) -> None:
        """Drop the key's items that are too old."""
        oldest_kept = self._clock.now() - self._retention.keep_s
        while key in self._by_key:
            name, kept = next(iter(self._by_key[key].items()))
            if kept.since >= oldest_kept:
                break
            self.drop(key, name)
