"""Keeps items that clients may ask for later, within limits: work and responses."""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

from orchestrator.clock import Clock
from orchestrator.errors import NotFound
from orchestrator.tasks.job import Stated
from orchestrator.tasks.work import Marks
from orchestrator.telemetry.metrics import Kept
from worker.environment import Section


class Retention(Section):
    """Limits on kept items: number, seconds, and total bytes."""

    keep_count: int
    keep_s: float
    keep_bytes: int


class Keepable(Protocol):
    """Work that can be kept."""

    id: str
    marks: Marks

    @property
    def job(self) -> Stated: ...
    @property
    def on_end(self) -> list[Callable[[Self], None]]: ...

    @property
    def kept_bytes(self) -> int:
        """Approximate memory in bytes of the kept item after its end."""


T = TypeVar("T")
W = TypeVar("W", bound=Keepable)

ItemCall = Callable[[str, str], None]
"""Called with the key and name of a client's item."""


def ignore(key: str, name: str) -> None:
    """A callback that does nothing."""


def no_such(what: str, item_id: str) -> NotFound:
    """The error for an unknown id, or for another caller's item; ``what`` is the kind of item."""
    error = NotFound(f"there is no {what} {item_id[:64]!r}; ended ones are kept only for a while")
    error.item_id = item_id
    return error


class _Kept(NamedTuple, Generic[T]):
    item: T
    since: float
    """When it was stored, in seconds of the clock."""
    bytes: int


class OwnedStore(Generic[T]):
    """Items by key and name, within the limits of a ``Retention``; other keys cannot see them.
    Beyond a limit, the oldest item of the key that keeps the most is dropped, so that no key
    displaces others' items."""

    def __init__(self, clock: Clock, retention: Retention) -> None:
        self.on_change: ItemCall = ignore
        """Called with the key and name of an item that was stored or dropped."""
        self.on_drop: Callable[[T], None] = lambda item: None
        """Called with an item that is dropped or too large to keep."""
        self._clock = clock
        self._retention = retention
        self._by_key: dict[str, OrderedDict[str, _Kept[T]]] = {}
        self._bytes: dict[str, int] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def kept_bytes(self) -> int:
        return sum(self._bytes.values())

    def kept(self) -> Kept:
        return Kept(self._count, self.kept_bytes)

    def put(self, key: str, name: str, item: T, size: int) -> None:
        """Keep an item of ``size`` bytes as the latest; it replaces one with the same name. An item
        larger than the byte limit is not kept."""
        self.adopt(key, name, item, size)
        self.on_change(key, name)

    def adopt(self, key: str, name: str, item: T, size: int) -> None:
        """Keep an item as ``put`` does, without ``on_change``."""
        self.let_go(key, name)
        bounds = self._retention
        if size > bounds.keep_bytes:
            self.on_drop(item)
            return
        own = self._by_key.setdefault(key, OrderedDict())
        own[name] = _Kept(item, self._clock.now(), size)
        self._bytes[key] = self._bytes.get(key, 0) + size
        self._count += 1
        self.prune()
        while self._count > bounds.keep_count or self.kept_bytes > bounds.keep_bytes:
            most = max(self._bytes, key=self._bytes.__getitem__)
            self.drop(most, next(iter(self._by_key[most])))

    def names(self) -> Iterator[tuple[str, str]]:
        return ((key, name) for key, own in self._by_key.items() for name in own)

    def get(self, key: str, name: str) -> T | None:
        self._prune(key)
        own = self._by_key.get(key)
        return None if own is None or name not in own else own[name].item

    def drop(self, key: str, name: str) -> None:
        """Remove an item. Idempotent."""
        own = self._by_key.get(key)
        if own is not None and name in own:
            item = own[name].item
            self.let_go(key, name)
            self.on_drop(item)
            self.on_change(key, name)

    def let_go(self, key: str, name: str) -> None:
        """Remove an item as ``drop`` does, without callbacks."""
        own = self._by_key.get(key)
        if own is None or name not in own:
            return
        self._bytes[key] -= own.pop(name).bytes
        self._count -= 1
        if not own:
            del self._by_key[key], self._bytes[key]

    def prune(self) -> None:
        for key in list(self._by_key):
            self._prune(key)

    def _prune(self, key: str) -> None:
        """Drop the key's items that are too old."""
        oldest_kept = self._clock.now() - self._retention.keep_s
        while key in self._by_key:
            name, kept = next(iter(self._by_key[key].items()))
            if kept.since >= oldest_kept:
                break
            self.drop(key, name)


class KeptStore(Generic[W]):
    """Work by id: all running work, and as much ended work as the limits allow."""

    def __init__(self, clock: Clock, retention: Retention, what: str) -> None:
        """``what``: the name of an item in the error for an unknown id."""
        self.on_forget: list[Callable[[W], None]] = []
        """Called with each item that is dropped."""
        self.latest_end = -math.inf
        """When the last item ended that its client may still fetch."""
        self._what = what
        self._all: dict[str, W] = {}
        self._running: dict[str, W] = {}
        self._ended: OwnedStore[W] = OwnedStore(clock, retention)
        self._ended.on_drop = self._dropped

    def __len__(self) -> int:
        return len(self._all)

    def __contains__(self, item: W) -> bool:
        return item.id in self._all

    def kept(self) -> Kept:
        """The number and bytes of ended items."""
        return self._ended.kept()

    def add(self, item: W) -> None:
        """Keep a running item, and after its end within the limits."""
        item.on_end.append(self._item_ended)
        self._all[item.id] = self._running[item.id] = item

    def get(self, item_id: str) -> W:
        """The item of that id. Raises ``NotFound``."""
        self.prune()
        item = self._all.get(item_id)
        if item is None:
            raise no_such(self._what, item_id)
        return item

    def ended(self) -> Iterator[W]:
        self.prune()
        found = [one for one in reversed(self._all.values()) if one.id not in self._running]
        return iter(sorted(found, key=lambda item: item.marks.ended, reverse=True))

    def newest_first(self) -> Iterator[W]:
        """Running items, then ended ones, both newest first."""
        yield from reversed(self._running.values())
        yield from self.ended()

    def prune(self) -> None:
        self._ended.prune()

    def forget(self, item: W) -> None:
        """Drop an item that has ended. Idempotent."""
        self._ended.drop(item.job.key, item.id)

    def is_awaited(self, item: W) -> bool:
        """Whether a client may fetch an ended item that is only here."""
        return True

    def _item_ended(self, item: W) -> None:
        del self._running[item.id]
        if self.is_awaited(item):
            self.latest_end = item.marks.ended
        self._ended.put(item.job.key, item.id, item, item.kept_bytes)

    def _dropped(self, item: W) -> None:
        self._all.pop(item.id, None)
        for call in self.on_forget:
            call(item)
