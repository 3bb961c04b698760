"""Tasks that wait for an instance: bounded, earliest deadline first, first come among equals.

No clock and no tasks of its own: the dispatcher says what time it is. A deadline is checked again
when a task leaves, so that expired work is never dispatched and never sorts as most urgent (DL-8).
"""

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

from orchestrator.deadline import Deadline


class Queueable(Protocol):
    """What the queue needs to know of a task."""

    @property
    def id(self) -> str: ...
    @property
    def deadline(self) -> Deadline: ...


T = TypeVar("T", bound=Queueable)


class _Key(NamedTuple):
    deadline: float
    arrival: int


class TaskQueue(Generic[T]):
    """Waiting tasks in the order in which they will leave."""

    def __init__(self, bound: int) -> None:
        """``bound`` -1 is unbounded, 0 refuses everything that cannot start at once."""
        self.bound = bound
        self._order: list[_Key] = []
        self._tasks: dict[_Key, T] = {}
        self._keys: dict[str, _Key] = {}
        self._arrivals = 0

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[T]:
        """Waiting tasks in order. The one just given may be removed meanwhile, no other."""
        place = 0
        while place < len(self._order):
            key = self._order[place]
            yield self._tasks[key]
            if place < len(self._order) and self._order[place] is key:
                place += 1

    @property
    def full(self) -> bool:
        return self.bound >= 0 and len(self._order) >= self.bound

    def push(self, task: T) -> None:
        """Add a task. Whether there is room is the caller's to ask first (``full``)."""
        assert task.id not in self._keys, f"task {task.id} is queued already"
        key = _Key(task.deadline.at, self._arrivals)
        self._arrivals += 1
        insort(self._order, key)
        self._tasks[key] = task
        self._keys[task.id] = key

    def remove(self, task: T) -> bool:
        """Take a task out, wherever it stands. False when it is not here."""
        key = self._keys.pop(task.id, None)
        if key is None:
            return False
        del self._order[bisect_left(self._order, key)]
        del self._tasks[key]
        return True

    def position(self, task: T) -> int | None:
        """How many tasks leave before this one; None when it is not here."""
        key = self._keys.get(task.id)
        return None if key is None else bisect_left(self._order, key)

    def expired(self, now: float) -> list[T]:
        """Take out every task whose deadline is past."""
        end = bisect_left(self._order, _Key(now, self._arrivals))
        gone = [self._tasks[key] for key in self._order[:end]]
        for task in gone:
            self.remove(task)
        return gone

    def check_integrity(self) -> None:
        """Raise ``AssertionError`` unless order, tasks and keys agree."""
        assert self._order == sorted(self._order)
        assert set(self._order) == set(self._tasks) == set(self._keys.values())
        assert len(self._order) == len(self._tasks) == len(self._keys)
        assert all(self._keys[task.id] == key for key, task in self._tasks.items())
